"""Checkpoints that a killed run can be resumed from, at rollout boundaries and inside rollouts."""

from __future__ import annotations

import logging
import zipfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from dare_lightning.families.checkpoint import sync_to_disk
from dare_lightning.parallel.collectives import gather_objects

log = logging.getLogger(__name__)


class StraightToFile(TorchCheckpointIO):
    """Writes where it is told to.

    Lightning's own makes the whole file in memory, then in the folder for temporary files (where a failure leaves
    it), and only then in its place; here the callback takes care that half a file never replaces a good one.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write `checkpoint` to `path`.

        Raises:
            OSError: it cannot be written, e.g. because the disk is full.
        """
        try:
            torch.save(checkpoint, path)
        except RuntimeError as error:  # how torch reports a failed write
            raise OSError(str(error).splitlines()[0]) from error


class RolloutCheckpoint(L.Callback):
    """Saves at the start of training, every `every_n_steps` optimiser steps, and at the end of epochs.

    A checkpoint is written beside its place, flushed to the disk and renamed, and only then are older ones removed:
    a kill or a full disk at any moment leaves the last good one. Asked to terminate (SIGTERM), a single process saves
    after the optimiser step it is in. Names hold no character that the command line would need quoted.

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
        self._stopped_inside = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Take the writing over from Lightning where it would use its own."""
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = StraightToFile()
        saved = _by_age(self.folder)
        self.newest = saved[-1] if saved else None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the start, so that there is always something to resume from."""
        if trainer.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob("*.part"):
                leftover.unlink()
            if trainer.ckpt_path is None:
                _set_aside(self.folder)
        if self.newest is None or trainer.ckpt_path is None:
            self.newest = None
            self.save(trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save inside an epoch, right after an optimiser step."""
        stepped = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        last = batch_idx + 1 >= trainer.num_training_batches
        due = self.every_n_steps is not None and trainer.global_step % self.every_n_steps == 0
        # Ranks may hear of a signal at different steps, and all of them have to save together.
        leaving = trainer.received_sigterm and trainer.world_size == 1
        # Lightning closes an epoch that max_steps or a time limit cuts short; a run that is later made longer has to
        # find it open.
        self._stopped_inside = not last and (trainer.global_step == trainer.max_steps or trainer.should_stop)
        if stepped and not last and (due or leaving or self._stopped_inside):
            self.save(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save at the boundary, after validation."""
        if (trainer.current_epoch + 1) % self.every_n_epochs == 0 and not self._stopped_inside:
            self.save(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Make sure that the last step is saved."""
        if not self._stopped_inside and (self.newest is None or self.newest.name != self._name(trainer)):
            self.save(trainer)

    def _name(self, trainer: L.Trainer) -> str:
        return f"step-{trainer.global_step:08d}.ckpt"

    def save(self, trainer: L.Trainer) -> None:
        """Write one checkpoint. Every rank must call it.

        Raises:
            RuntimeError: it cannot be written, and it is `required`. On every rank.
        """
        target = self.folder / self._name(trainer)
        problem = next((found for found in gather_objects(self._write(trainer, target)) if found), None)
        if problem is None:
            self.newest = target
            return
        self.failures += 1
        if self.required:
            raise RuntimeError(f"cannot write the checkpoint {target}: {problem}")
        if trainer.is_global_zero:
            log.error(
                "checkpoint %s was not written (%s), failure %d of this run; the newest good one is %s",
                target, problem, self.failures, self.newest,
            )  # fmt: skip

    def _write(self, trainer: L.Trainer, target: Path) -> str | None:
        """What prevented it, None where nothing did."""
        part = target.with_suffix(".part")
        try:
            trainer.save_checkpoint(part)
        except OSError as error:
            # The other ranks, which had nothing to write, wait for this one where the failed call would have met them.
            trainer.strategy.barrier("Trainer.save_checkpoint")
            part.unlink(missing_ok=True)
            return str(error)
        try:
            if trainer.is_global_zero:
                self._commit(part, target)
        except OSError as error:
            part.unlink(missing_ok=True)
            return str(error)
        return None

    def _commit(self, part: Path, target: Path) -> None:
        sync_to_disk(part)
        part.replace(target)
        sync_to_disk(self.folder)
        for old in _by_age(self.folder)[: -self.keep]:
            if old != target:
                old.unlink()


def _by_age(folder: Path) -> list[Path]:
    """Oldest first, by when they were written: a run that went back to an early step overtakes what lies there."""
    return sorted(folder.glob("step-*.ckpt"), key=lambda path: (path.stat().st_mtime_ns, path.name))


def _set_aside(folder: Path) -> None:
    """Move the checkpoints of an earlier run, which a resume of this one must not find, out of the way."""
    if not (found := _by_age(folder)):
        return
    number = 1 + len(list(folder.glob("earlier-run-*")))
    aside = folder / f"earlier-run-{number}"
    aside.mkdir()
    for path in found:
        path.rename(aside / path.name)
    log.warning("%s held checkpoints of another run and this one starts anew: they are in %s now", folder, aside)


def newest_checkpoint(folder: Path) -> Path:
    """The checkpoint written last among the readable ones of a run.

    Raises:
        FileNotFoundError: there is none.
    """
    for path in reversed(_by_age(folder)):
        if zipfile.is_zipfile(path):
            return path
    raise FileNotFoundError(f"no checkpoint in {folder}; found {sorted(p.name for p in folder.glob('*'))}")
