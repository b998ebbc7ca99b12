"""Settings of benchmarks: every experiment builds its samplers, and what is published stands beside it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import DictConfig, open_dict

from dare_lightning.callbacks.opencompass import OpenCompassEval
from dare_lightning.cli.arguments import parse
from dare_lightning.cli.benchmarks import as_written, compared, show_comparison, show_record
from dare_lightning.cli.checks import check
from dare_lightning.cli.compose import compose
from dare_lightning.cli.errors import UserError
from dare_lightning.cli.tree import PACKAGED, ConfTree
from dare_lightning.evaluation.benchmark import find_data
from dare_lightning.evaluation.results import BenchmarkResult, Item, Record

EXPERIMENTS = [name for name in ConfTree().options("experiment") if name.startswith("eval/")]


def composed(command: str, *words: str) -> DictConfig:
    cfg = compose(command, words)
    with open_dict(cfg):
        cfg.pop("hydra")
    check(command, cfg)
    return cfg


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_builds_its_benchmarks(name: str) -> None:
    cfg = composed("eval", f"experiment={name}")
    callback: OpenCompassEval = instantiate(cfg.eval)
    assert set(callback.suite.benchmarks) == set(callback.backends) == set(cfg.eval.benchmarks)
    published = {benchmark.published for benchmark in callback.suite.benchmarks.values()}
    assert None not in published or published == {None}


def test_every_benchmark_is_an_option_that_builds() -> None:
    options = ConfTree().options("eval")
    callback: OpenCompassEval = instantiate(composed("eval", f"eval=[{','.join(options)}]").eval)
    assert list(callback.backends) == options
    assert {type(b).name for b in callback.suite.benchmarks.values()} == set(options)
    assert len(options) == len(list((PACKAGED / "eval").glob("[!_]*.yaml"))) == 14


def test_every_benchmark_names_the_files_that_it_lacks(tmp_path: Path) -> None:
    options = ConfTree().options("eval")
    callback: OpenCompassEval = instantiate(composed("eval", f"eval=[{','.join(options)}]").eval)
    reading = {name: benchmark for name, benchmark in callback.suite.benchmarks.items() if benchmark.required_files()}
    assert set(options) - set(reading) == {"countdown", "sudoku"}
    for name, benchmark in reading.items():
        file = benchmark.required_files()[0]
        with pytest.raises(FileNotFoundError) as missing:
            find_data(benchmark, str(tmp_path))
        assert f"eval={name}: no {file.path}" in str(missing.value)
        assert file.source.startswith("https://")
        assert f"get it from {file.source} and put it at {tmp_path / file.path}" in str(missing.value)


def test_settings_for_all_benchmarks_win() -> None:
    cfg = composed("fit", "eval=[gsm8k,mmlu]", "eval.decoding={steps: 3, max_new_tokens: 3, block_length: 3}")
    assert {backend.steps for backend in instantiate(cfg.eval).backends.values()} == {3}
    assert instantiate(composed("fit", "eval=gsm8k", "eval.on_error=nan").eval).on_error == "nan"


def test_no_cell_is_empty_and_a_failure_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    entry = Item("b/0", True, {"verifier": True}, "right", "1", "1", "1", "hash")
    settings = {"published": None}
    done = BenchmarkResult("good", "DONE", score=100.0, metrics={"unparsed": 0.0}, settings=settings, items=[entry])
    failed = BenchmarkResult("bad", "FAILED", "OSError: no disk", settings=settings)
    record = Record(3, 1, {}, {}, {"good": done, "bad": failed})
    show_record(record, Path("file"))
    show_comparison(compared(record, record), [Path("a"), Path("b")])
    said = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.split("\n") if "│" in line]
    assert [row[0] for row in rows] == ["good", "bad", "good"]
    assert all(cell not in ("", "-", "nan") for row in rows for cell in row)
    assert rows[1][1] == "FAILED: OSError: no disk"
    assert "bad: FAILED in a: OSError: no disk" in said
    assert as_written({"eval/bad": math.nan, "eval/good": 100.0}, record.failed) == {
        "eval/bad": "FAILED: OSError: no disk",
        "eval/good": 100.0,
    }


def test_two_results_are_named_to_be_compared() -> None:
    assert parse(["eval", "--compare", "a", "b"]).compare == [Path("a"), Path("b")]
    with pytest.raises(UserError, match="--compare belongs to eval"):
        parse(["fit", "--compare", "a", "b"])
