"""The command `fit`."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig


def run(cfg: DictConfig, run_dir: Path) -> int:
    """Carry out the command; returns the exit status."""
    raise NotImplementedError("the command fit is not available yet")
