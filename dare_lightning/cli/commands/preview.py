"""The command `preview`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console

from dare_lightning.cli.errors import before_the_start
from dare_lightning.datamodules.preview import preview_dialogues, preview_prompts
from dare_lightning.datamodules.prompts import PromptDataModule


def run(cfg: DictConfig, run_dir: Path) -> int:
    """Show samples as the policy sees them, lengths, and what was dropped; returns the exit status."""
    with before_the_start():
        policy = instantiate(cfg.model)
        data: Any = instantiate(cfg.data, policy=policy)
        data.setup("fit")
    if isinstance(data, PromptDataModule):
        source = data.path or type(data.task).__name__
        shown = preview_prompts(policy.tokenizer, data.train, cfg.count, "prompts", data.dropped, source)
    else:
        shown = preview_dialogues(data, cfg.count)
    Console().print(shown)
    return 0
