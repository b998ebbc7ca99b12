"""The command `export`."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from dare_lightning.cli.build import build_policy
from dare_lightning.cli.errors import UserError, before_the_start
from dare_lightning.cli.load import fill_from_checkpoint
from dare_lightning.export import export_policy


def run(cfg: DictConfig, run_dir: Path) -> int:
    """Write the policy of a checkpoint as a folder that loads without this project; returns the exit status."""
    folder = Path(cfg.output_folder or run_dir / "model")
    if folder.is_dir() and any(folder.iterdir()) and not cfg.overwrite:
        raise UserError(f"output_folder={folder} is not empty; choose another, or add overwrite=true")
    with before_the_start():
        policy = build_policy(cfg)
        fill_from_checkpoint(policy, cfg)
    print(export_policy(policy, folder, adapter=cfg.adapter, force=cfg.overwrite, dtype=cfg.dtype))
    return 0
