"""GPQA: questions of biology, physics and chemistry that cannot be looked up."""

from __future__ import annotations

import csv
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from dare_lightning.evaluation.benchmark import Benchmark, DataFile, Description, LoadConfig
from dare_lightning.evaluation.tasks import dataset_of

_QUESTIONS = "data/gpqa/gpqa_diamond.csv"
_EXAMPLES = "data/gpqa/chain_of_thought_examples.json"
_SOURCE = "https://huggingface.co/datasets/Idavidrein/gpqa (after asking for access)"
_LETTERS = "ABCD"
_COLUMN = 7  # of the question; the right answer and three wrong ones follow
_SEED = 0
_BEGIN = (
    "\nHere are some example questions from experts. Answer the final question yourself, following the format of the"
    " previous questions exactly.\n"
)
_END = (
    "When you're ready to answer, please use the format 'The correct answer is (X)' where X is the correct letter"
    " choice from 'ABCD'."
)
# What is longer is no letter, and to look for its end would take quadratic time.
_ANSWER = re.compile(r"the correct answer is \(([^)]{1,99})\)", re.IGNORECASE)


class GPQA(Benchmark):
    """A question of the diamond set and four answers; the letter is the answer.

    Args:
        shots: 5 shows the authors' five answered examples before the question, without their explanations, and shuffles
            the answers, as DARE and LLaDA do; OpenCompass ships no such configuration. 0 asks as OpenCompass does.
        base: see `Benchmark`.
    """

    name = "gpqa"
    title = "GPQA"
    default_config = "gpqa/gpqa_gen_4baadb"

    def __init__(self, shots: Literal[0, 5] = 5, **base: Any) -> None:
        super().__init__(**base)
        where = f"eval.benchmarks.{self.name}"
        if shots not in (0, 5):
            raise ValueError(f"{where}.shots={shots}; choose 0 or 5")
        if shots and base.get("config") is not None:
            raise ValueError(f"{where}.config is for shots=0; with shots=5 the prompt is the one of DARE")
        self.shots = shots
        if shots:
            self.config = "(none: five examples, as in DARE)"

    @property
    def settings(self) -> dict[str, Any]:
        """How it is run, for the record."""
        return super().settings | {"shots": self.shots}

    @property
    def shots_in_text(self) -> int:
        """The examples stand in the text of the question."""
        return self.shots

    @property
    def scores_elsewhere(self) -> bool:
        """Another Python does not know how the answers were shuffled."""
        return self.shots == 0

    def required_files(self) -> tuple[DataFile, ...]:
        """The questions, and the examples where they are shown."""
        examples = DataFile(_EXAMPLES, "https://github.com/idavidrein/gpqa (prompts/chain_of_thought_examples.json)")
        return (DataFile(_QUESTIONS, _SOURCE), *([examples] if self.shots else []))

    def descriptions(self, load: LoadConfig, folder: Path) -> list[Description]:
        """OpenCompass's data set, or that of five examples."""
        if self.shots == 0:
            return super().descriptions(load, folder)
        from opencompass.datasets.gpqa import GPQAEvaluator

        rows = shuffled(folder / _QUESTIONS)
        begin = _BEGIN + _shown(folder / _EXAMPLES)
        asked = [{"question": begin + _asked(row), "answer": row["answer"]} for row in rows]
        evaluated = {"evaluator": {"type": GPQAEvaluator}, "pred_postprocessor": {"type": letter_of}}
        return [dataset_of("GPQA_diamond", asked, "answer", evaluated)]

    def adapted(self, descriptions: list[Description], folder: Path) -> list[Description]:
        """Read from the given folder."""
        return [description | {"path": str(folder / "data/gpqa")} for description in descriptions]


def shuffled(file: Path) -> list[dict[str, str]]:
    """Question, answers by letter and the right letter, in the order of DARE: one generator for all rows, seed 0."""
    rng = random.Random(_SEED)
    found = []
    with file.open(encoding="utf-8", newline="") as opened:
        for row in csv.reader(opened):
            question, *answers = row[_COLUMN : _COLUMN + 5]
            if question == "Question":
                continue
            right = answers[0]
            rng.shuffle(answers)
            letters = dict(zip(_LETTERS, answers, strict=True))
            found.append({"question": question, **letters, "answer": _LETTERS[answers.index(right)]})
    return found


def letter_of(text: str) -> str:
    """What stands in the brackets of `The correct answer is (X)`, "" where nothing does."""
    found = _ANSWER.search(text)
    return found[1].strip() if found else ""


def _shown(file: Path) -> str:
    examples: Sequence[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["questions"]
    texts = []
    for example in examples:
        choices = "".join(f"({letter}) {choice}\n" for letter, choice in example["choices"].items())
        answer = f"The correct answer is ({example['correct_answer']})"
        texts.append(f"Question: {example['question']}\nChoices:\n{choices}{answer}\n")
    return "\n".join(texts)


def _asked(row: dict[str, str]) -> str:
    choices = "".join(f"{letter}. {row[letter]}\n" for letter in _LETTERS)
    return f"\nQuestion:\n{row['question']}\nChoices:\n{choices}{_END}"
