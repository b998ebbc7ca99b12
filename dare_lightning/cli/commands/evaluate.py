"""The command `eval`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, open_dict
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from dare_lightning.callbacks.opencompass import OpenCompassEval
from dare_lightning.cli.benchmarks import (
    as_written,
    check_same_weights,
    compared,
    failed_benchmarks,
    names_of,
    show_comparison,
    show_record,
)
from dare_lightning.cli.build import Objects, build
from dare_lightning.cli.errors import before_the_start
from dare_lightning.cli.inherit import recipe_of
from dare_lightning.cli.load import fill_from_checkpoint
from dare_lightning.evaluation.results import BenchmarkResult, find_record


def run(cfg: DictConfig, run_dir: Path) -> int:
    """Score a policy on benchmarks or held-out data and print what was measured; returns the exit status.

    It is 1 where a benchmark failed.
    """
    asked = names_of(cfg)
    heldout = not asked if cfg.heldout is None else bool(cfg.heldout)
    with open_dict(cfg):
        if asked:
            cfg.eval.at_start = True
        if not heldout:
            cfg.callbacks = {name: node for name, node in (cfg.callbacks or {}).items() if name != "validation"}
    with before_the_start():
        objects = build(cfg, run_dir)
        fill_from_checkpoint(objects.policy, cfg)
    before = None if cfg.rerun_path is None else recipe_of(Path(cfg.rerun_path))[1]
    if before is not None:
        check_same_weights(objects.policy, before, Path(cfg.rerun_path))
    _validate(objects, heldout)
    if not objects.trainer.is_global_zero:
        return 0
    benchmarks = [c for c in objects.trainer.callbacks if isinstance(c, OpenCompassEval)]  # type: ignore[attr-defined]
    record, file = (benchmarks[0].record, benchmarks[0].file) if benchmarks else (None, None)
    _show_metrics(objects, run_dir, heldout, failed_benchmarks(benchmarks))
    if record is None or file is None:
        return 0
    show_record(record, file)
    if before is not None:
        show_comparison(compared(before, record), [find_record(Path(cfg.rerun_path)), file])
    return 1 if record.failed else 0


def _validate(objects: Objects, heldout: bool) -> None:
    if heldout or objects.method.online:
        # The rollout of an online method wants its prompts; without the held-out callback nothing is done with them.
        objects.trainer.validate(objects.method, datamodule=objects.data, verbose=False)
    else:
        nothing: DataLoader[None] = DataLoader([None], batch_size=None)  # type: ignore[arg-type]
        objects.trainer.validate(objects.method, dataloaders=nothing, verbose=False)


def _show_metrics(objects: Objects, run_dir: Path, heldout: bool, failed: Sequence[BenchmarkResult]) -> None:
    metrics = {name: float(value) for name, value in sorted(objects.trainer.callback_metrics.items())}
    (run_dir / "result.json").write_text(json.dumps(as_written(metrics, failed), indent=2), encoding="utf-8")
    if heldout:
        table = Table("metric", "value")
        for name, value in metrics.items():
            if not name.startswith("eval/"):
                table.add_row(name, f"{value:.6g}")
        Console().print(table, f"written to {run_dir / 'result.json'}")
