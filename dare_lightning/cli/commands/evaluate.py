"""The command `eval`."""

from __future__ import annotations

import json
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from dare_lightning.cli.build import build
from dare_lightning.cli.load import fill_from_checkpoint


def run(cfg: DictConfig, run_dir: Path) -> int:
    """Score a policy on held-out data and print what was measured; returns the exit status."""
    objects = build(cfg, run_dir)
    fill_from_checkpoint(objects.policy, cfg)
    objects.trainer.validate(objects.method, datamodule=objects.data, verbose=False)
    if objects.trainer.is_global_zero:
        metrics = {name: float(value) for name, value in sorted(objects.trainer.callback_metrics.items())}
        (run_dir / "result.json").write_text(json.dumps(metrics, indent=2), encoding="utf-8")
        table = Table("metric", "value")
        for name, value in metrics.items():
            table.add_row(name, f"{value:.6g}")
        Console().print(table, f"written to {run_dir / 'result.json'}")
    return 0
