"""Results, their comparison, and how questions reach the ranks; without OpenCompass."""

from __future__ import annotations

import importlib.util
import math
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dare_lightning.cli.build import build
from dare_lightning.cli.compose import compose
from dare_lightning.evaluation.adapter import Answered, Asked, Asker, to_messages
from dare_lightning.evaluation.benchmark import find_data
from dare_lightning.evaluation.benchmarks.arc_c import ARCChallenge
from dare_lightning.evaluation.benchmarks.gpqa import GPQA
from dare_lightning.evaluation.benchmarks.gsm8k import GSM8K
from dare_lightning.evaluation.benchmarks.sudoku import SudokuBenchmark, SudokuTask
from dare_lightning.evaluation.compare import Comparison, compare, paired_interval
from dare_lightning.evaluation.fingerprint import weights_fingerprint
from dare_lightning.evaluation.isolation import untouched_process
from dare_lightning.evaluation.results import BenchmarkResult, Item, Record, find_record
from dare_lightning.evaluation.runner import Suite
from dare_lightning.evaluation.service import PolicyService, ServiceError
from tests.tiny import tiny_llada


def item(number: int, right: bool, part: str = "a", prompt: str = "") -> Item:
    status = "right" if right else "wrong"
    return Item(f"{part}/{number}", right, {"verifier": right}, status, "1", "1", "1", prompt or f"{part}{number}")


def result(*items: Item, **changes: Any) -> BenchmarkResult:
    return BenchmarkResult("b", "DONE", score=0.0, items=list(items), **changes)


def record(**benchmarks: BenchmarkResult) -> Record:
    return Record(3, 1, {"weights": "w"}, {"limit": None}, benchmarks)


def test_a_record_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    written = record(b=result(item(0, True), item(1, False), data=[{"file": "f", "sha256": "0"}]))
    file = written.save(tmp_path / "evaluations" / "step-00000003.eval.json")
    assert Record.load(file) == written
    assert find_record(tmp_path) == file
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a result of an evaluation"):
        Record.load(tmp_path / "other.json")


def test_a_failed_benchmark_is_logged_as_no_number() -> None:
    failed = BenchmarkResult("b", "FAILED", "OSError: no disk")
    assert math.isnan(failed.logged["b"])
    assert record(b=failed, c=result(item(0, True))).failed == [failed]


def test_items_are_paired_by_question() -> None:
    first = result(item(0, True), item(1, False), item(2, True), item(3, True))
    second = result(item(3, False), item(1, True), item(0, True), item(2, True, prompt="other words"))
    found = compare(first, second)
    assert isinstance(found, Comparison)
    assert (found.items, found.to_right, found.to_wrong) == (3, ["a/1"], ["a/3"])
    assert (found.first, found.second) == pytest.approx((200 / 3, 200 / 3))
    assert found.notes == ["1 questions were asked in other words and are left out"]


def test_what_else_differs_is_named() -> None:
    data = [{"file": "f", "sha256": "0"}]
    first = result(item(0, True), settings={"limit": 1, "mode": "generate"}, data=data)
    second = replace(first, settings={"limit": 2, "mode": "generate"}, data=[{"file": "f", "sha256": "1"}])
    found = compare(first, second)
    assert isinstance(found, Comparison)
    assert found.notes == ["limit differs: 1 and 2", "data file f differs"]
    assert compare(BenchmarkResult("b", "FAILED", "why"), first) == "FAILED in a: why"


def test_parts_count_alike_whatever_their_size() -> None:
    small, large = [item(0, True, "s")], [item(n, False, "l") for n in range(9)]
    found = compare(result(*small, *large), result(*small, *large))
    assert isinstance(found, Comparison)
    assert found.first == 50
    assert found.interval == (0, 0)


def test_the_interval_is_that_of_a_normal_mean_where_there_is_much() -> None:
    differences = [1] * 300 + [-1] * 200 + [0] * 500
    low, high = paired_interval([differences], seed=1)
    # mean 0.1, variance 0.5 - 0.01
    half = 1.96 * 100 * math.sqrt(0.49 / 1000)
    assert (low, high) == pytest.approx((10 - half, 10 + half), abs=0.3)
    assert paired_interval([differences], seed=1) == (low, high)


def test_answers_to_one_question_do_not_narrow_the_interval_as_questions_would() -> None:
    def asked(repeats: int, better: bool) -> BenchmarkResult:
        answers = [(n, repeat, better and n % 3 == 0) for n in range(30) for repeat in range(repeats)]
        items = [item(n, right, prompt=f"{n}") for n, _, right in answers]
        names = [f"a/{n}.{repeat}" if repeats > 1 else f"a/{n}" for n, repeat, _ in answers]
        return result(*(replace(one, id=name) for one, name in zip(items, names, strict=True)))

    once, often = (compare(asked(repeats, False), asked(repeats, True)) for repeats in (1, 8))
    assert isinstance(once, Comparison)
    assert isinstance(often, Comparison)
    assert (often.items, often.interval) == (240, once.interval)
    assert compare(asked(1, False), asked(8, False)) == "no item is in both: their parts, limits or repeats differ"


def test_prompts_become_conversations() -> None:
    mark = {"section": "round", "pos": "begin"}
    asked = [mark, {"role": "SYSTEM", "prompt": "s"}, "\n", {"role": "HUMAN", "prompt": "q"}]
    turns = [*asked, {"role": "HUMAN", "prompt": "r"}, {"role": "BOT", "prompt": "[BEGIN]"}]
    assert [(m["role"], m["content"]) for m in to_messages(turns)] == [
        ("system", "s"),
        ("user", "q\nr"),
        ("assistant", "[BEGIN]"),
    ]
    assert to_messages("text") == [{"role": "user", "content": "text"}]


def test_a_seed_belongs_to_the_question() -> None:
    asked: list[Asked] = []

    def generate(questions: Any) -> list[Answered]:
        asked.extend(questions)
        return [Answered("", 0) for _ in questions]

    def seeds(prompts: list[str], seed: int = 1) -> list[int]:
        asked.clear()
        Asker(generate, lambda judged: [], len, seed).answers(prompts)
        return [question.seed for question in asked]

    one, two, again = seeds(["a", "b", "a"])
    assert len({one, two, again}) == 3  # a repetition is another draw
    assert seeds(["b", "a"]) == [two, one]
    assert seeds(["a"], seed=2) != [one]


def test_a_missing_file_is_named_with_its_source_and_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data/gsm8k").mkdir(parents=True)
    (tmp_path / "data/gsm8k/test.jsonl").touch()
    with pytest.raises(FileNotFoundError) as found:
        find_data(GSM8K(), str(tmp_path))
    said = str(found.value)
    assert "no data/gsm8k/train.jsonl in" in said
    assert "github.com/openai/grade-school-math" in said
    assert f"put it at {tmp_path}/data/gsm8k/train.jsonl" in said
    (tmp_path / "data/gsm8k/train.jsonl").touch()
    assert find_data(GSM8K(), str(tmp_path)) == tmp_path
    assert find_data(GSM8K(), str(tmp_path / "data")) == tmp_path
    monkeypatch.setenv("COMPASS_DATA_CACHE", str(tmp_path))
    assert find_data(GSM8K(), None) == tmp_path
    assert find_data(SudokuBenchmark(SudokuTask()), None) == tmp_path  # needs none


def test_a_run_without_a_benchmarks_data_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    # The folder of the model is empty: reading a policy from it would fail otherwise.
    model = [f"model.path={tmp_path}", "model=llada", "seed=1"]
    missing = FileNotFoundError if importlib.util.find_spec("opencompass") else ImportError
    for command, more in (("fit", []), ("eval", ["method=sft"])):
        cfg = compose(command, [*model, "eval=[gsm8k]", f"eval.data_dir={tmp_path}", *more])
        with pytest.raises(missing, match="no data/gsm8k/test.jsonl|OpenCompass"):
            build(cfg, tmp_path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GSM8K(mode="likelihood"), "GSM8K has no given answers to choose from"),
        (lambda: ARCChallenge(scoring="verifier"), "ARC-Challenge offers opencompass"),
        (lambda: GSM8K(limit=0), "eval.benchmarks.gsm8k.limit=0 must be at least 1"),
        (lambda: ARCChallenge(split="train"), "choose one of dev, test"),  # type: ignore[arg-type]
        (lambda: GPQA(shots=3), "eval.benchmarks.gpqa.shots=3; choose 0 or 5"),  # type: ignore[arg-type]
        (lambda: GPQA(config="gpqa/gpqa_gen"), "eval.benchmarks.gpqa.config is for shots=0"),
    ],
    ids=["mode", "scoring", "limit", "split", "shots", "config"],
)
def test_what_a_benchmark_does_not_offer_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_without_opencompass_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opencompass", None)
    with pytest.raises(ImportError, match=r"pip install 'dare-lightning\[eval\]'"):
        Suite({"sudoku": SudokuBenchmark(SudokuTask())}).check()


def test_the_service_reports_failures_to_the_driver_and_goes_on() -> None:
    service = PolicyService({"double": lambda items: [2 * x for x in items], "short": lambda items: items[:1]})
    with pytest.raises(ServiceError, match="short returned 1 results for 2 items"):
        service.serve(lambda: service.call("short", [1, 2]))
    assert service.serve(lambda: service.call("double", [1, 2, 3])) == [2, 4, 6]
    with pytest.raises(KeyError, match="no operation 'half'; there are double, short"):
        service.serve(lambda: service.call("half", [1]))


def test_a_fingerprint_tells_weights_apart() -> None:
    policy = tiny_llada()
    before = weights_fingerprint(policy)
    assert weights_fingerprint(tiny_llada()) == before
    weight = next(policy.parameters())
    value = weight.data[0, 0].item()
    weight.data[0, 0] = value * (1 + 1e-6) + 1e-8
    assert weights_fingerprint(policy) != before
    weight.data[0, 0] = value
    assert weights_fingerprint(policy) == before
    first, second = weight.data[0].clone(), weight.data[1].clone()
    weight.data[0], weight.data[1] = second, first
    assert weights_fingerprint(policy) != before


def test_a_process_is_left_as_it_was(tmp_path: Path) -> None:
    before = (signal.getsignal(signal.SIGALRM), list(sys.path), dict(os.environ), os.getcwd())
    with untouched_process():
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        sys.path.insert(0, "elsewhere")
        os.environ["ADDED"] = "1"
        os.chdir(tmp_path)
    assert (signal.getsignal(signal.SIGALRM), list(sys.path), dict(os.environ), os.getcwd()) == before
