"""Benchmarks on the command line: built from `eval`, shown, run again from a result file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Column, Table

from dare_lightning.callbacks.opencompass import OpenCompassEval
from dare_lightning.cli.errors import UserError
from dare_lightning.cli.inherit import COMPOSED_FILE
from dare_lightning.evaluation.compare import Comparison, compare
from dare_lightning.evaluation.fingerprint import weights_fingerprint
from dare_lightning.evaluation.results import BenchmarkResult, Record, find_record
from dare_lightning.evaluation.runner import Suite
from dare_lightning.families.base import PolicyModel

SHOWN_FLIPS = 10


def names_of(cfg: DictConfig) -> list[str]:
    """The benchmarks that a configuration names."""
    return list((cfg.get("eval") or {}).get("benchmarks") or {})


def check_benchmarks(cfg: DictConfig) -> None:
    """Refuse benchmarks that cannot run, before weights are read. Raises as `Suite.check` does."""
    if names_of(cfg):
        benchmarks = {name: instantiate(node) for name, node in cfg.eval.benchmarks.items()}
        Suite(benchmarks, cfg.eval.get("data_dir"), scoring_python=cfg.eval.get("scoring_python")).check()


def build_benchmarks(cfg: DictConfig, run_dir: Path) -> list[OpenCompassEval]:
    """The callback that runs the benchmarks; none where none is named."""
    if not names_of(cfg):
        return []
    composed = run_dir / COMPOSED_FILE
    callback: OpenCompassEval = instantiate(cfg.eval)
    # Not an argument: whatever it describes would be built.
    callback.recipe = json.loads(composed.read_text(encoding="utf-8")) if composed.is_file() else None
    return [callback]


def check_same_weights(policy: PolicyModel, record: Record, file: Path) -> None:
    """Refuse to call it the same evaluation where the weights are others.

    Raises:
        UserError: they are.
    """
    if weights_fingerprint(policy) != record.policy["weights"]:
        raise UserError(
            f"{file} was measured on other weights (after {record.step} optimiser steps, from"
            f" {record.policy['source'] or 'a model built in memory'}): give the checkpoint of that step, ckpt_path=..."
        )


def as_written(metrics: Mapping[str, float], failed: Sequence[BenchmarkResult]) -> dict[str, float | str]:
    """Metrics for `result.json`: a benchmark that failed says so and why, other numbers that JSON lacks are text."""
    written: dict[str, float | str] = {
        name: value if math.isfinite(value) else str(value) for name, value in metrics.items()
    }
    return written | {f"eval/{result.name}": f"FAILED: {result.reason}" for result in failed}


def failed_benchmarks(callbacks: Iterable[object]) -> list[BenchmarkResult]:
    """What failed in the last evaluation."""
    records = [c.record for c in callbacks if isinstance(c, OpenCompassEval)]
    return [result for record in records if record is not None for result in record.failed]


def show_record(record: Record, file: Path) -> None:
    """A table of scores; what failed says so, and why. No cell is empty."""
    table = Table("benchmark", "score", "published", "items", "unparsed", "seconds")
    for name, result in record.benchmarks.items():
        published = result.settings["published"]
        said = "none" if published is None else f"{published:.2f}"
        if result.status == "FAILED":
            score, items, unparsed = f"FAILED: {result.reason}", "FAILED", "FAILED"
        else:
            score, items = f"{result.score:.2f}", str(len(result.items))
            unparsed = f"{result.metrics['unparsed']:.1f} %"
        table.add_row(name, score, said, items, unparsed, f"{result.seconds:.1f}")
    Console().print(table, f"items and settings are in {file}")


def compare_files(first: Path, second: Path) -> int:
    """Print how two evaluations differ; returns the exit status.

    Raises:
        UserError: they have no benchmark in common, or a file is none of an evaluation.
    """
    try:
        files = [find_record(first), find_record(second)]
        records = [Record.load(file) for file in files]
    except (FileNotFoundError, ValueError) as error:
        raise UserError(str(error)) from error
    if not set(records[0].benchmarks) & set(records[1].benchmarks):
        names = " and ".join(", ".join(record.benchmarks) or "nothing" for record in records)
        raise UserError(f"nothing to compare: {files[0]} and {files[1]} have {names}")
    show_comparison(compared(*records), files)
    return 0


def compared(first: Record, second: Record) -> dict[str, Comparison | str]:
    """Every benchmark of either evaluation: compared, or a sentence that says why not."""
    found: dict[str, Comparison | str] = {}
    for name in dict.fromkeys((*first.benchmarks, *second.benchmarks)):
        a, b = first.benchmarks.get(name), second.benchmarks.get(name)
        if a is not None and b is not None:
            found[name] = compare(a, b)
        elif (alone := a or b) is not None:
            failed = f", and FAILED there: {alone.reason}" if alone.status == "FAILED" else ""
            found[name] = f"only in {'b' if a is None else 'a'}{failed}"
    return found


def show_comparison(comparisons: dict[str, Comparison | str], files: list[Path]) -> None:
    """A table of differences with their intervals, and the items that flipped."""
    console = Console(soft_wrap=True)
    console.print(f"a  {files[0]}\nb  {files[1]}")
    interval = Column("95 % interval", no_wrap=True)
    table = Table("benchmark", "items", "a", "b", "b - a", interval, "to right", "to wrong")
    for name, found in comparisons.items():
        if isinstance(found, str):
            console.print(f"{name}: {found}")
            continue
        low, high = found.interval
        numbers = [
            f"{found.first:.2f}",
            f"{found.second:.2f}",
            f"{found.difference:+.2f}",
            f"{low:+.2f} .. {high:+.2f}",
        ]
        table.add_row(name, str(found.items), *numbers, str(len(found.to_right)), str(len(found.to_wrong)))
    if table.row_count:
        console.print(table)
    for name, found in comparisons.items():
        if isinstance(found, str):
            continue
        for note in found.notes:
            console.print(f"{name}: {note}")
        for said, flipped in (("wrong -> right", found.to_right), ("right -> wrong", found.to_wrong)):
            if flipped:
                more = f" and {len(flipped) - SHOWN_FLIPS} more" if len(flipped) > SHOWN_FLIPS else ""
                console.print(f"{name}, {said}: {', '.join(flipped[:SHOWN_FLIPS])}{more}")
