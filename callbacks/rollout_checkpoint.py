"""Checkpoints that a killed run can be resumed from, at rollout boundaries and inside rollouts."""

from __future__ import annotations

import logging
import os
import zipfile
from pathlib import Path
from typing import Any

import lightning as L

log = logging.getLogger(__name__)


class RolloutCheckpoint(L.Callback):
    """Saves at the start of training, every `every_n_steps` optimiser steps, and at the end of epochs.

    A checkpoint is written beside its place, flushed to the disk and renamed, and only then are older ones removed:
    a kill or a full disk at any moment leaves the last good one. Names hold no character that the command line
    would need quoted.

    Args:
        folder: where checkpoints go.
        every_n_steps: optimiser steps between checkpoints inside an epoch; None saves at its end only.
        every_n_epochs: epochs (online: rollouts) between checkpoints.
        keep: how many of the newest to keep, at least 1.
        required: whether a checkpoint that cannot be written stops the run; otherwise it is counted and logged.
    """

    def __init__(
        self,
        folder: str,
        every_n_steps: int | None = None,
        every_n_epochs: int = 1,
        keep: int = 2,
        required: bool = False,
    ) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("every_n_epochs", every_n_epochs), ("keep", keep)):
            if value is not None and value < 1:
                raise ValueError(f"callbacks.checkpoint.{name}={value} must be at least 1")
        self.folder = Path(folder)
        self.every_n_steps = every_n_steps
        self.every_n_epochs = every_n_epochs
        self.keep = keep
        self.required = required
        self.newest: Path | None = None
        self.failures = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the start, so that there is always something to resume from."""
        if trainer.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob("*.part"):
                leftover.unlink()
        if not self._saved():
            self.save(trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save inside an epoch, right after an optimiser step."""
        stepped = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        last = batch_idx + 1 >= trainer.num_training_batches
        if self.every_n_steps and stepped and not last and trainer.global_step % self.every_n_steps == 0:
            self.save(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save at the boundary, after validation."""
        if (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self.save(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Make sure that the last step is saved."""
        if self.newest is None or self.newest.name != self._name(trainer):
            self.save(trainer)

    def _name(self, trainer: L.Trainer) -> str:
        return f"step-{trainer.global_step:08d}.ckpt"

    def _saved(self) -> list[Path]:
        return sorted(self.folder.glob("step-*.ckpt"))

    def save(self, trainer: L.Trainer) -> None:
        """Write one checkpoint. Every rank must call it."""
        target = self.folder / self._name(trainer)
        part = target.with_suffix(".part")
        try:
            trainer.save_checkpoint(part)
            if trainer.is_global_zero:
                self._commit(part, target)
        except OSError as error:
            self.failures += 1
            part.unlink(missing_ok=True)
            if self.required:
                raise RuntimeError(f"cannot write the checkpoint {target}: {error}") from error
            log.error("checkpoint %s was not written (%s); the newest good one is %s", target, error, self.newest)
            return
        self.newest = target

    def _commit(self, part: Path, target: Path) -> None:
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(target)
        for old in self._saved()[: -self.keep]:
            if old != target:
                old.unlink()


def newest_checkpoint(folder: Path) -> Path:
    """The newest readable checkpoint of a run.

    Raises:
        FileNotFoundError: there is none.
    """
    candidates = sorted(folder.glob("step-*.ckpt"), reverse=True)
    for path in candidates:
        if zipfile.is_zipfile(path):
            return path
    raise FileNotFoundError(f"no checkpoint in {folder}; found {sorted(p.name for p in folder.glob('*'))}")
