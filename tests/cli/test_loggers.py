"""What a second start in a folder leaves of the first."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

from dare_lightning.cli.build import build_loggers
from dare_lightning.cli.compose import compose


def test_a_table_of_metrics_survives_the_next_start_in_its_folder(tmp_path: Path) -> None:
    cfg = compose("fit", ["logger=csv", f"run_dir={tmp_path}"])
    cfg = OmegaConf.create({"logger": OmegaConf.to_container(cfg.logger, resolve=True)})
    for number in range(3):
        (logger,) = build_loggers(cfg, tmp_path)
        logger.log_metrics({"loss": float(number)}, step=number)
        logger.save()
    kept = {path.name: path.read_text().splitlines()[-1].split(",")[0] for path in (tmp_path / "csv").glob("*.csv")}
    assert kept == {"metrics.1.csv": "0.0", "metrics.2.csv": "1.0", "metrics.csv": "2.0"}
