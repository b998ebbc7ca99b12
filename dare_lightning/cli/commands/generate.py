"""The command `generate`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from dare_lightning.cli.errors import UserError, before_the_start
from dare_lightning.cli.load import load_policy
from dare_lightning.datamodules.chat import encode_prompt
from dare_lightning.datamodules.prompts import PromptDataModule
from dare_lightning.diffusion.noise import derive_seed
from dare_lightning.families.base import PolicyModel
from dare_lightning.generation.show import as_json, render_denoising

Messages = Sequence[Mapping[str, str]]


def run(cfg: DictConfig, run_dir: Path) -> int:
    """Answer prompts; print them in the colours of their denoising order, or as JSON; returns the exit status."""
    if not cfg.get("rollout"):
        raise UserError("nothing to generate with: add rollout=builtin")
    if cfg.count < 1:
        raise UserError(f"count={cfg.count} must be at least 1: prompts taken from the data")
    with before_the_start():
        policy = load_policy(cfg)
        backend = instantiate(cfg.rollout.backend)
        backend.validate(policy)
    backend.update_weights(policy, version=0)
    # Where completions share a tree, each prompt gets as many as it has leaves.
    prompts = [ids for ids in _prompts(cfg, policy) for _ in range(backend.capabilities.group_size or 1)]
    seeds = [derive_seed(cfg.seed, index) for index in range(len(prompts))]
    with torch.inference_mode():
        batch = backend.generate(prompts, seeds).to("cpu")
    settings = OmegaConf.to_container(cfg.rollout.backend, resolve=True)
    assert isinstance(settings, dict)
    named = {str(name): value for name, value in settings.items()}
    records = [as_json(policy.tokenizer, batch, row, named) for row in range(len(prompts))]
    file = run_dir / "completions.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    if cfg.json:
        print(json.dumps(records, indent=2))
        return 0
    console = Console()
    for row, record in enumerate(records):
        shown = Text(record["prompt"], style="dim") + Text("\n") + render_denoising(policy.tokenizer, batch, row)
        console.print(Panel(shown, title=f"{row}: {record['forward_passes']} forward passes", title_align="left"))
    console.print(f"written to {file}", soft_wrap=True)
    return 0


def _prompts(cfg: DictConfig, policy: PolicyModel) -> list[list[int]]:
    """Token ids of what is asked: given on the command line, read from a file, or held-out prompts of the data."""
    asked = _asked(cfg)
    if asked:
        return [encode_prompt(policy.tokenizer, messages) for messages in asked]
    data: Any = instantiate(cfg.data, policy=policy)
    if not isinstance(data, PromptDataModule):
        raise UserError("these data hold answers, not prompts: add prompt=..., or choose data=sudoku, countdown, ...")
    data.setup("validate")
    return [ids for _, ids in data.heldout[: cfg.count]]


def _asked(cfg: DictConfig) -> list[Messages]:
    if cfg.prompt is not None and cfg.prompts_path is not None:
        raise UserError("prompt and prompts_path are both given; choose one")
    if cfg.prompt is not None:
        texts = [cfg.prompt] if isinstance(cfg.prompt, str | int | float) else list(cfg.prompt)
        return [_from_user(str(text)) for text in texts]
    if cfg.prompts_path is None:
        return []
    path = Path(cfg.prompts_path)
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise UserError(f"prompts_path={path}: the file has no prompt")
    return [_from_line(line, path) if path.suffix == ".jsonl" else _from_user(line) for line in lines]


def _from_user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def _from_line(line: str, path: Path) -> Messages:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"prompts_path={path}: a line is not JSON ({error})") from error
    for key in ("messages", "prompt"):
        if isinstance(record, dict) and key in record:
            return _from_user(record[key]) if isinstance(record[key], str) else list(record[key])
    raise UserError(f'prompts_path={path}: a line has neither "prompt" nor "messages"')
