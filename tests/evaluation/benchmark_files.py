"""Small files in the formats of the benchmarks, and what would be right and wrong answers to their questions."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from dare_lightning.evaluation.adapter import Asked
from tests.shared import shared_file

Questions = list[tuple[str, str, str]]
"""Words that only this question has, a right answer, a wrong one."""

SUBJECTS = ("abstract_algebra", "anatomy")
CATEGORIES = ("math", "computer science")
OLYMPIADS = ("OE_TO_maths_en_COMP", "OE_TO_physics_zh_CEE")

_CLOSE = """```python
def has_close_elements(numbers, threshold):
    return any(abs(a - b) < threshold for i, a in enumerate(numbers) for b in numbers[:i])
```"""
_REMOVE = """'def remove_Occ(s, ch):
    first, last = s.find(ch), s.rfind(ch)
    return s[:first] + s[first + 1 : last] + s[last + 1 :] if first != last else s[:first] + s[first + 1 :]'
[DONE]"""


def replies(questions: Questions, right: Callable[[int], bool] = lambda number: number % 2 == 0) -> Any:
    """An operation that knows the questions: right answers where `right` says so of the question's number."""

    def answer(asked: Sequence[Asked]) -> list[tuple[str, int]]:
        found = []
        for question in asked:
            words = "\n".join(message["content"] for message in question.messages)
            number = max((n for n, (key, _, _) in enumerate(questions) if key in words), default=-1)
            assert number >= 0, words
            found.append((questions[number][1 if right(number) else 2], 5))
        return found

    return answer


def write_all(folder: Path) -> dict[str, Questions]:
    """`folder/data` with files for every benchmark that reads some; questions by benchmark."""
    data = folder / "data"
    plain, pro = mmlu(data / "mmlu"), _mmlu_pro(data / "mmlu_pro" / "data")
    return {
        "mmlu": plain,
        "mmlu_zero": [(key, f"So it is.\nANSWER: {right}", f"ANSWER: {wrong}") for key, right, wrong in plain],
        "mmlu_pro": pro,
        "mmlu_pro_few": [(key, right[-1], wrong[-1]) for key, right, wrong in pro],
        "hellaswag": _hellaswag(data / "hellaswag"),
        "arc_c": arc(data / "ARC" / "ARC-c"),
        "gpqa": _gpqa(data / "gpqa"),
        # The right answer moves through the letters as OpenCompass shuffles: BCDA, CDAB, DABC, ABCD.
        "gpqa_zero": [
            (f"Question {n}?", f"The correct answer is {'DCBA'[n]}", "The correct answer is") for n in range(4)
        ],
        "gsm8k": gsm8k(data / "gsm8k"),
        "math": _math(data / "math"),
        "aime24": _lines(data / "aime.jsonl", _aime("origin_prompt", "gold_answer"), "origin_prompt", "gold_answer"),
        "aime25": _lines(data / "aime2025" / "aime2025.jsonl", _aime("question", "answer"), "question", "answer"),
        "olympiadbench": _olympiad(data / "OlympiadBench"),
        "humaneval": humaneval(data / "humaneval"),
        "mbpp": mbpp(data / "mbpp"),
    }


def arc(folder: Path, count: int = 4) -> Questions:
    """Additions with four answers, the second of them right."""
    rows, questions = [], []
    for number in range(count):
        choices = [{"label": "ABCD"[k], "text": str(number + k)} for k in range(4)]
        rows.append({"question": {"stem": f"How much is {number} plus 1?", "choices": choices}, "answerKey": "B"})
        questions.append((f"is {number} plus", "B", "C"))
    _write_lines(folder / "ARC-Challenge-Dev.jsonl", rows)
    return questions


def gsm8k(folder: Path, count: int = 4) -> Questions:
    """Real items."""
    table = parquet.read_table(shared_file("data/sft/test/gsm8k.parquet")).slice(0, count).to_pylist()
    rows = [{key: row["extra_info"][key] for key in ("question", "answer")} for row in table]
    for split in ("train", "test"):
        _write_lines(folder / f"{split}.jsonl", rows)
    return [(row["question"][:60], row["answer"].replace("####", "The answer is"), "It is -1.") for row in rows]


def humaneval(folder: Path, count: int = 3) -> Questions:
    """Real items, the first of which has a right answer here."""
    rows, questions = [], []
    for number, row in enumerate(_rl_rows("humaneval", count)):
        prompt = row["prompt"][0]["content"].split("\n", 1)[1]
        name = prompt.rpartition("def ")[2].partition("(")[0]
        rows.append(
            {
                "task_id": f"HumanEval/{number}",
                "prompt": prompt,
                "entry_point": name,
                "canonical_solution": "",
                "test": row["reward_model"]["ground_truth"],
            }
        )
        questions.append((f"def {name}(", _CLOSE, "    return None"))
    _write_lines(folder / "human-eval-v2-20210705.jsonl", rows)
    return questions


def mbpp(folder: Path, count: int = 3) -> Questions:
    """Real items, the first of which has a right answer here."""
    rows, questions = [], []
    for number, row in enumerate(_rl_rows("mbpp", count)):
        tests = json.loads(row["reward_model"]["ground_truth"])
        text = row["prompt"][-2]["content"].split("your task: ")[1].split(" Your code should")[0]
        rows.append({"task_id": number, "text": text, "code": "", "test_list": tests, "challenge_test_list": []})
        questions.append((text, _REMOVE, "return None\n[DONE]"))
    # OpenCompass shows none of the first ten rows: they are the examples of the original paper.
    _write_lines(folder / "mbpp.jsonl", [rows[0]] * 10 + rows)
    return questions


def _rl_rows(name: str, count: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = (
        parquet.read_table(shared_file(f"data/rl/test/{name}.parquet")).slice(0, count).to_pylist()
    )
    return rows


def mmlu(folder: Path) -> Questions:
    """Questions of two subjects, and five answered ones of each."""
    questions = []
    for subject in SUBJECTS:
        for split, count in (("dev", 5), ("test", 2)):
            file = folder / split / f"{subject}_{split}.csv"
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("w", newline="") as opened:
                rows = [(f"{split} {subject} {n}?", "one", "two", "three", "four", "ABCD"[n % 4]) for n in range(count)]
                csv.writer(opened).writerows(rows)
            if split == "test":
                questions += [(row[0], row[5], "D") for row in rows]
    return questions


def _mmlu_pro(folder: Path) -> Questions:
    folder.mkdir(parents=True)
    questions = []
    for split, count in (("test", 2), ("validation", 5)):
        rows = [
            {
                "question": f"{split} {category} {n}?",
                "options": [f"option {k}" for k in range(10)],
                "answer": "ABCDEFGHIJ"[n],
                "answer_index": n,
                "cot_content": f"A: Let's think step by step. The answer is ({'ABCDEFGHIJ'[n]}).",
                "category": category,
                "src": "test",
            }
            for category in CATEGORIES
            for n in range(count)
        ]
        parquet.write_table(pa.Table.from_pylist(rows), folder / f"{split}-00000-of-00001.parquet")
        if split == "test":
            questions = [(row["question"], f"So.\nANSWER: {row['answer']}", "ANSWER: J") for row in rows]
    return questions


def _hellaswag(folder: Path) -> Questions:
    rows = [
        {"query": f"Baking: Somebody bakes cake {n} and", "choices": ["eats it.", "no.", "or.", "the."], "gold": n % 2}
        for n in range(4)
    ]
    _write_lines(folder / "hellaswag.jsonl", rows)
    return [(f"cake {n}", "AB"[n % 2], "C") for n in range(4)]


def _gpqa(folder: Path) -> Questions:
    folder.mkdir(parents=True)
    with (folder / "gpqa_diamond.csv").open("w", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow([*("x" * 7), "Question", "Correct", "Wrong1", "Wrong2", "Wrong3"])
        writer.writerows([[*("x" * 7), f"Question {n}?", "right", "w1", "w2", "w3"] for n in range(4)])
    choices = dict(zip("ABCD", ("one", "two", "three", "four"), strict=True))
    example = {"question": "Example?", "choices": choices, "explanation": "Because.", "correct_answer": "C"}
    (folder / "chain_of_thought_examples.json").write_text(json.dumps({"questions": [example] * 5}))
    # Where the first of four lands, row by row, after `random.seed(0)`.
    return [
        (f"Question {n}?", f"The correct answer is ({'BAAB'[n]}).", f"The correct answer is {'BAAB'[n]}")
        for n in range(4)
    ]


def _math(folder: Path) -> Questions:
    rows = {
        str(n): {"problem": f"How much is {n} halves?", "solution": rf"It is \boxed{{\frac{{{n}}}{{2}}}}."}
        for n in range(4)
    }
    folder.mkdir(parents=True)
    (folder / "math.json").write_text(json.dumps(rows))
    return [(f"is {n} halves", rf"\boxed{{{n}/2}}", r"\boxed{7}") for n in range(4)]


def _aime(question: str, answer: str) -> list[dict[str, Any]]:
    return [{question: f"Which number is {n} hundred?", answer: str(100 * n)} for n in range(2)]


def _lines(file: Path, rows: list[dict[str, Any]], question: str, answer: str) -> Questions:
    _write_lines(file, rows)
    return [(row[question], rf"\boxed{{{row[answer]}}}", r"\boxed{7}") for row in rows]


def _olympiad(folder: Path) -> Questions:
    folder.mkdir(parents=True)
    questions = []
    for part in OLYMPIADS:
        rows = [
            {
                "question": f"{part} {n}?",
                "final_answer": [f"{n}.5"],
                "language": "Chinese" if "_zh_" in part else "English",
                "subject": "Math" if "maths" in part else "Physics",
                "question_type": "Open-ended",
                "answer_type": "Numerical",
                "is_multiple_answer": False,
                "unit": "m",
                "error": "1e-1",
            }
            for n in range(2)
        ]
        (folder / f"{part}.json").write_text(json.dumps(rows))
        # Within the tolerance of a tenth.
        questions += [(row["question"], rf"\boxed{{{n}.55}}", rf"\boxed{{{n}.7}}") for n, row in enumerate(rows)]
    return questions


def _write_lines(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
