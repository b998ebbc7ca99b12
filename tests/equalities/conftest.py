"""A complete small online run and a complete small offline one, on real parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import Logger

from dare_lightning.callbacks.rng_state import RngState
from dare_lightning.callbacks.rollout import RolloutCallback
from dare_lightning.callbacks.rollout_checkpoint import RolloutCheckpoint
from dare_lightning.callbacks.validation import HeldOutValidation
from dare_lightning.datamodules.prompts import PromptDataModule
from dare_lightning.datamodules.sft import SFTDataModule
from dare_lightning.evaluation.benchmarks.sudoku import SudokuTask
from dare_lightning.families.adapters import LoRA
from dare_lightning.generation.builtin import BuiltinBackend
from dare_lightning.methods.base import DiffusionPolicyModule
from dare_lightning.methods.coupled_grpo import CoupledGRPO
from dare_lightning.methods.sft import SFT, Normalization
from dare_lightning.rewards.base import Example, Verdict
from tests.tiny import tiny_llada

PRECISION = {torch.float32: "32-true", torch.float64: "64-true", torch.bfloat16: "bf16-true"}


def variety(completions: Sequence[str], examples: Sequence[Example]) -> list[Verdict]:
    """A reward that differs within the groups of a policy that knows nothing: the share of different characters."""
    return [Verdict(len(set(text)) / 17, "right" if len(set(text)) > 12 else "wrong", text) for text in completions]


def sampler(temperature: float = 1.0) -> BuiltinBackend:
    return BuiltinBackend(steps=2, max_new_tokens=17, temperature=temperature)


def trainer(callbacks: Sequence[L.Callback], **options: Any) -> L.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "logger": False,
        "log_every_n_steps": 1,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
    }
    return L.Trainer(callbacks=list(callbacks), **(settings | options))


class Online:
    """Two rollouts of 4 prompts × 4 answers; 2 updates and 2 inner epochs each: 8 optimiser steps."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        method: type[DiffusionPolicyModule] = CoupledGRPO,
        adapter: bool = False,
        **data: Any,
    ) -> None:
        self.policy = tiny_llada(dtype=dtype)
        if adapter:
            LoRA(rank=4, alpha=8.0).apply(self.policy)
        self.precision = PRECISION[dtype]
        settings: dict[str, Any] = {
            "group_size": 4,
            "prompts_per_rollout": 4,
            "updates_per_rollout": 2,
            "inner_epochs": 2,
            "micro_batch": 4,
            "train_prompts": 16,
            "val_prompts": 4,
        }
        self.data = PromptDataModule(self.policy, variety, task=SudokuTask(form="compact"), **settings | data)
        self.method = method(self.policy, partial(torch.optim.AdamW, lr=1e-2), kl_coef=0.02)
        self.rollout = RolloutCallback(sampler())

    def fit(self, *callbacks: L.Callback, ckpt_path: Path | None = None, **options: Any) -> L.Trainer:
        parts = [self.rollout, HeldOutValidation(sampler(0.0)), RngState(), *callbacks]
        run = trainer(parts, precision=self.precision, **options)
        run.accumulate_grad_batches = self.data.micro_batches_per_step(run.world_size)
        run.fit(self.method, datamodule=self.data, ckpt_path=ckpt_path)
        return run


class Offline:
    """Two epochs over 14 puzzles in steps of 4, the last one shorter: 8 optimiser steps."""

    def __init__(
        self, dtype: torch.dtype = torch.float32, normalization: Normalization = "sequence", **data: Any
    ) -> None:
        self.policy = tiny_llada(dtype=dtype)
        self.precision = PRECISION[dtype]
        settings: dict[str, Any] = {
            "batch_size": 4,
            "micro_batch": 2,
            "count": 14,
            "max_length": 64,
            "append_eos": False,
            "task": SudokuTask(form="compact"),
        }
        self.data = SFTDataModule(self.policy, **settings | data)
        self.method = SFT(self.policy, partial(torch.optim.AdamW, lr=1e-2), normalization=normalization)

    def fit(self, *callbacks: L.Callback, ckpt_path: Path | None = None, **options: Any) -> L.Trainer:
        run = trainer([RngState(), *callbacks], precision=self.precision, **options)
        run.accumulate_grad_batches = self.data.micro_batches_per_step(run.world_size)
        run.fit(self.method, datamodule=self.data, ckpt_path=ckpt_path)
        return run


class Keep(L.Callback):
    """Saves after given optimiser steps, and records what every micro-batch held."""

    def __init__(self, folder: Path, at: Sequence[int] = ()) -> None:
        self.folder, self.at = folder, set(at)
        self.seen: list[tuple[int, tuple[int, ...], int]] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((trainer.global_step, tuple(batch.sample_index.tolist()), int(batch.noise_seed.sum())))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        place = batch_idx + 1
        stepped = place % trainer.accumulate_grad_batches == 0 or place == trainer.num_training_batches
        if stepped and trainer.global_step in self.at:
            trainer.save_checkpoint(self.folder / f"inside-{trainer.global_step}.ckpt")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.global_step in self.at:
            trainer.save_checkpoint(self.folder / f"boundary-{trainer.global_step}.ckpt")


class Record(Logger):
    """Keeps the metrics of every optimiser step, epoch and validation."""

    name = version = None  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.steps.setdefault(int(step or 0), {}).update(metrics)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to keep."""

    def series(self, name: str) -> list[float]:
        return [values[name] for _, values in sorted(self.steps.items()) if name in values]

    def names(self) -> set[str]:
        return {name for values in self.steps.values() for name in values}


def weights(run: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.method.state_dict().items()}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers write where they are started."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=[Online, Offline], ids=["online", "offline"])
def setting(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return request.param


__all__ = ["Keep", "Offline", "Online", "Record", "RolloutCheckpoint", "sampler", "trainer", "weights"]
