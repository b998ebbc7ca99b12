"""OpenCompass itself, on every benchmark: whatever answers, each question is scored as it should be."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from dare_lightning.evaluation.benchmark import Benchmark
from dare_lightning.evaluation.benchmarks.aime24 import AIME24
from dare_lightning.evaluation.benchmarks.aime25 import AIME25
from dare_lightning.evaluation.benchmarks.arc_c import ARCChallenge
from dare_lightning.evaluation.benchmarks.countdown import CountdownBenchmark, CountdownTask
from dare_lightning.evaluation.benchmarks.gpqa import GPQA
from dare_lightning.evaluation.benchmarks.gsm8k import GSM8K
from dare_lightning.evaluation.benchmarks.hellaswag import HellaSwag
from dare_lightning.evaluation.benchmarks.humaneval import HumanEval
from dare_lightning.evaluation.benchmarks.math import MATH
from dare_lightning.evaluation.benchmarks.mbpp import MBPP
from dare_lightning.evaluation.benchmarks.mmlu import MMLU
from dare_lightning.evaluation.benchmarks.mmlu_pro import MMLUPro
from dare_lightning.evaluation.benchmarks.olympiadbench import OlympiadBench
from dare_lightning.evaluation.benchmarks.sudoku import SudokuBenchmark, SudokuTask
from dare_lightning.evaluation.results import BenchmarkResult, sha256_of
from dare_lightning.evaluation.runner import LIKELIHOOD, Suite
from dare_lightning.evaluation.service import PolicyService
from dare_lightning.evaluation.verifiers import code_verifier, math_verifier
from dare_lightning.rewards.base import Example, Reward
from dare_lightning.rewards.countdown import CountdownReward
from dare_lightning.rewards.gsm8k import GSM8KReward
from dare_lightning.rewards.sudoku import SudokuReward
from tests.evaluation.benchmark_files import CATEGORIES, OLYMPIADS, SUBJECTS, Questions, replies, write_all
from tests.shared import shared_file
from tests.tiny import tiny_tokenizer

pytest.importorskip("opencompass", reason="needs OpenCompass: pip install 'dare-lightning[eval]'")

BENCHMARKS: dict[str, Benchmark] = {
    "mmlu": MMLU(subsets=SUBJECTS),
    "mmlu_zero": MMLU(subsets=SUBJECTS, config="mmlu/mmlu_gen"),
    "mmlu_pro": MMLUPro(subsets=CATEGORIES),
    "mmlu_pro_few": MMLUPro(subsets=CATEGORIES, config="mmlu_pro/mmlu_pro_few_shot_gen_bfaf90"),
    "hellaswag": HellaSwag(),
    "arc_c": ARCChallenge(),
    "gpqa": GPQA(),
    "gpqa_zero": GPQA(shots=0),
    "gsm8k": GSM8K(limit=3),
    "math": MATH(),
    "aime24": AIME24(repeats=2),
    "aime25": AIME25(),
    "olympiadbench": OlympiadBench(subsets=OLYMPIADS),
    "humaneval": HumanEval(),
    "mbpp": MBPP(),
    "countdown": CountdownBenchmark(CountdownTask(), count=4),
    "sudoku": SudokuBenchmark(SudokuTask(), count=4),
}
# Only the first question of each has a right answer in the files.
CODE = ("humaneval", "mbpp")


def planning() -> dict[str, Questions]:
    """The tasks of our own, whose answers are known."""
    tasks = {"countdown": CountdownTask(), "sudoku": SudokuTask()}
    return {
        name: [
            (example.messages[0]["content"], example.extra["answer"], "<answer>1</answer>")
            for example in task.examples("heldout", 4, 42)
        ]
        for name, task in tasks.items()
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Questions]]:
    """The folder that holds `data/`, and all questions."""
    folder = tmp_path_factory.mktemp("benchmarks")
    return folder, write_all(folder) | planning()


def run(suite: Suite, log: Path, operations: dict[str, Any]) -> dict[str, BenchmarkResult]:
    """Results of a suite whose questions are answered by these operations."""
    service = PolicyService(operations)
    results: dict[str, BenchmarkResult] = service.serve(lambda: suite.run(service, tiny_tokenizer(), log))
    return results


@pytest.fixture(scope="module")
def results(data: tuple[Path, dict[str, Questions]]) -> dict[str, BenchmarkResult]:
    """Every benchmark once, with right answers to the questions of even number."""
    folder, questions = data
    suite = Suite(BENCHMARKS, str(folder), batch_size=3)
    return run(suite, folder / "log", {name: replies(asked) for name, asked in questions.items()})


@pytest.mark.parametrize("benchmark", [GSM8K(limit=1), ARCChallenge(mode="likelihood", limit=1)], ids=lambda b: b.mode)
def test_nothing_is_left_where_the_command_was_started(
    benchmark: Benchmark, data: tuple[Path, dict[str, Questions]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answers = {"one": lambda asked: [("", 0) for _ in asked], LIKELIHOOD: lambda judged: [1.0 for _ in judged]}
    found = run(Suite({"one": benchmark}, str(data[0])), data[0] / "log", answers)
    assert found["one"].status == "DONE"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", BENCHMARKS)
def test_right_and_wrong_answers_are_told_apart(
    name: str, results: dict[str, BenchmarkResult], data: tuple[Path, dict[str, Questions]]
) -> None:
    result, (_, questions) = results[name], data
    assert (result.status, result.reason) == ("DONE", None)
    count = min(len(questions[name]), BENCHMARKS[name].limit or 99)
    expected = [n == 0 if name in CODE else n % 2 == 0 for n in range(count)] * BENCHMARKS[name].repeats
    assert [item.right for item in result.items] == expected
    assert all(set(item.scores.values()) == {item.right} for item in result.items)
    assert result.score == pytest.approx(100 * sum(expected) / len(expected))
    assert set(result.items[0].scores) == set(BENCHMARKS[name].scorings)
    assert all(item.tokens == 5 for item in result.items)


def training_examples(name: str) -> list[Example]:
    """The same tasks as training reads them."""
    if name in ("humaneval", "mbpp"):
        rows = parquet.read_table(shared_file(f"data/rl/test/{name}.parquet")).slice(0, 3).to_pylist()
        return [Example(row["prompt"], row["reward_model"]["ground_truth"], row["extra_info"], name) for row in rows]
    if name == "gsm8k":
        rows = parquet.read_table(shared_file("data/rl/test/gsm8k.parquet")).slice(0, 3).to_pylist()
        return [Example(row["prompt"], row["reward_model"]["ground_truth"], {}, name) for row in rows]
    if name == "math":
        return [Example([], rf"\frac{{{n}}}{{2}}", {}, name) for n in range(4)]
    task = CountdownTask() if name == "countdown" else SudokuTask()
    return task.examples("heldout", 4, 42)


REWARDS: dict[str, Callable[[], Reward]] = {
    "gsm8k": lambda: GSM8KReward(last_number=True),
    "math": math_verifier,
    "humaneval": code_verifier,
    "mbpp": code_verifier,
    "countdown": CountdownReward,
    "sudoku": SudokuReward,
}


@pytest.mark.parametrize("name", REWARDS)
def test_reward_and_benchmark_say_the_same_of_the_same_answers(name: str, results: dict[str, BenchmarkResult]) -> None:
    items = results[name].items
    verdicts = REWARDS[name]()([item.prediction for item in items], training_examples(name))
    assert [verdict.status for verdict in verdicts] == [item.status for item in items]
    assert [verdict.answer for verdict in verdicts] == [item.answer for item in items]
    assert len({verdict.status for verdict in verdicts}) > 1


def test_each_repetition_is_an_item_of_its_own(results: dict[str, BenchmarkResult]) -> None:
    assert [item.id for item in results["aime24"].items] == [f"aime2024/{n}.{r}" for r in range(2) for n in range(2)]


def test_the_data_are_recorded_with_their_hashes(
    results: dict[str, BenchmarkResult], data: tuple[Path, dict[str, Questions]]
) -> None:
    folder, _ = data
    for result in results.values():
        for file in result.data:
            assert file["sha256"] == sha256_of(folder / file["file"])
    assert [file["file"] for file in results["mmlu"].data][0] == "data/mmlu/dev/abstract_algebra_dev.csv"
    assert len(results["mmlu_pro"].data) == 2


def test_questions_are_conversations(results: dict[str, BenchmarkResult]) -> None:
    roles = [message["role"] for message in results["mbpp"].example_prompt]
    assert roles == ["user", "assistant"] * 4  # three solved tasks, the task, the beginning of the answer
    assert results["mbpp"].example_prompt[-1]["content"] == "[BEGIN]\n"
    assert [message["role"] for message in results["mmlu"].example_prompt] == ["user", "assistant"] * 5 + ["user"]


def test_gpqa_shows_five_examples_as_dare_does(results: dict[str, BenchmarkResult]) -> None:
    (message,) = results["gpqa"].example_prompt
    shown = "Question: Example?\nChoices:\n(A) one\n(B) two\n(C) three\n(D) four\nThe correct answer is (C)\n"
    assert message["content"].count(shown) == 5
    assert "\n\nQuestion:\nQuestion 0?\nChoices:\nA. " in message["content"]
    assert message["content"].endswith("where X is the correct letter choice from 'ABCD'.")
    assert "Because" not in message["content"]


def test_the_examples_that_were_shown_are_counted(results: dict[str, BenchmarkResult]) -> None:
    shots = {name: result.settings["shots"] for name, result in results.items() if result.settings["shots"]}
    assert shots == {"mmlu": 5, "mmlu_pro_few": 5, "gpqa": 5, "gsm8k": 4, "mbpp": 3}


def test_given_answers_are_chosen_by_their_likelihood(data: tuple[Path, dict[str, Questions]]) -> None:
    folder, _ = data
    named = {"arc": ARCChallenge, "hellaswag": HellaSwag, "mmlu": partial(MMLU, subsets=SUBJECTS)}
    suite = Suite({name: make(mode="likelihood") for name, make in named.items()}, str(folder), limit=2)
    asked: list[Any] = []

    def losses(judged: Any) -> list[float]:
        asked.extend(judged)
        wanted = ("1", "eats it.", "A")
        return [0.5 if answer.answer in wanted else 1.0 for answer in judged]

    results = run(suite, folder / "log", {LIKELIHOOD: losses})
    assert {name: result.score for name, result in results.items()} == {"arc": 50.0, "hellaswag": 50.0, "mmlu": 50.0}
    first = results["arc"].items[0]
    assert first.losses == {"A": 1.0, "B": 0.5, "C": 1.0, "D": 1.0}
    assert first.prediction == "B"
    # All answers to a question meet the same noise.
    seeds: dict[str, set[int]] = {}
    for judged in asked:
        seeds.setdefault(str(judged.messages), set()).add(judged.seed)
    assert all(len(found) == 1 for found in seeds.values())
    assert len(set.union(*seeds.values())) == len(seeds) == 8


def test_a_benchmark_that_fails_says_why_and_leaves_the_others_alone(
    data: tuple[Path, dict[str, Questions]], tmp_path: Path
) -> None:
    folder, questions = data
    suite = Suite({"arc_c": ARCChallenge(), "gsm8k": GSM8K(config="gsm8k/no_such"), "aime25": AIME25()}, str(folder))

    def broken(asked: Any) -> list[Any]:
        raise RuntimeError("out of memory")

    results = run(suite, tmp_path / "log", {"arc_c": broken, "aime25": replies(questions["aime25"])})
    assert [result.status for result in results.values()] == ["FAILED", "FAILED", "DONE"]
    assert results["arc_c"].reason == "ServiceError: arc_c failed on rank 0: RuntimeError: out of memory"
    assert "no configuration gsm8k/no_such; there are" in str(results["gsm8k"].reason)
    assert "out of memory" in (tmp_path / "log").read_text()


# Another Python.


def python_elsewhere(folder: Path, runs: str) -> tuple[str, Path]:
    """An interpreter's path from here, and the file in which each of its starts leaves a line."""
    starts, program = folder / "starts.txt", folder / "python"
    program.write_text(f'#!/bin/sh\necho "$2" >> {starts}\n{runs}\n')
    program.chmod(0o755)
    return os.path.relpath(program), starts


@pytest.mark.slow
def test_opencompass_may_score_in_another_python(
    data: tuple[Path, dict[str, Questions]], results: dict[str, BenchmarkResult], tmp_path: Path
) -> None:
    folder, questions = data
    python, starts = python_elsewhere(tmp_path, f'exec {sys.executable} "$@"')
    suite = Suite({"mmlu": BENCHMARKS["mmlu"]}, str(folder), batch_size=3, scoring_python=python)
    found = run(suite, tmp_path / "log", {"mmlu": replies(questions["mmlu"])})["mmlu"]
    assert (found.status, found.reason) == ("DONE", None)
    assert found.items == results["mmlu"].items
    assert (found.score, found.parts) == (results["mmlu"].score, results["mmlu"].parts)
    # One process for both subjects, after one that only named its versions.
    assert [line[:30] for line in starts.read_text().split("\n")].count("opencompass.tasks.openicl_eval") == 1
    assert found.settings["scoring_python"] == str(tmp_path / "python")
    assert found.settings["scoring_versions"]["opencompass"] == importlib.metadata.version("opencompass")


def test_a_python_that_cannot_score_is_refused_or_a_failure(
    data: tuple[Path, dict[str, Questions]], tmp_path: Path
) -> None:
    folder, questions = data
    tolerant = OlympiadBench(subsets=OLYMPIADS, scoring="opencompass")
    with pytest.raises(ValueError, match="cannot be installed beside ours: name a Python .* eval.scoring_python=PATH"):
        Suite({"olympiadbench": tolerant}, str(folder)).check()
    with pytest.raises(ImportError, match="eval.scoring_python=/no/python does not run"):
        Suite({"sudoku": BENCHMARKS["sudoku"]}, scoring_python="/no/python").check()
    bare, _ = python_elsewhere(tmp_path, f'exec {sys.executable} -S "$@"')
    with pytest.raises(ImportError, match="has no OpenCompass .*pip install opencompass"):
        Suite({"sudoku": BENCHMARKS["sudoku"]}, scoring_python=bare).check()
    crashes = f'if [ "$1" = -m ]; then echo "no such library" >&2; exit 3; fi\nexec {sys.executable} "$@"'
    broken, _ = python_elsewhere(tmp_path, crashes)
    suite = Suite({"olympiadbench": tolerant}, str(folder), scoring_python=broken)
    suite.check()
    found = run(suite, tmp_path / "log", {"olympiadbench": replies(questions["olympiadbench"])})["olympiadbench"]
    assert (found.status, found.score) == ("FAILED", None)
    assert f"eval.scoring_python={tmp_path}/python ended with status 3: no such library" in str(found.reason)
