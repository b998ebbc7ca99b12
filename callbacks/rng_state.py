"""The global random state in the checkpoint, for what still draws from it (dropout)."""

from __future__ import annotations

import logging
import random
from typing import Any

import lightning as L
import numpy as np
import torch

from dare_lightning.parallel.collectives import gather_objects, rank_and_world

log = logging.getLogger(__name__)


class RngState(L.Callback):
    """Saves the global generators of torch, CUDA, NumPy and Python, one state a rank, and restores them on resume.

    Between two epochs the saved state is put back before the data loader starts (starting one draws a number);
    inside an epoch after it has started, because the uninterrupted run had drawn that number long before.
    """

    def __init__(self) -> None:
        self._trainer: L.Trainer | None = None
        self._ran_batches = False
        self._pending: dict[str, Any] | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Remember whose progress to ask."""
        self._trainer = trainer
        self._ran_batches = False

    def state_dict(self) -> dict[str, Any]:
        """The state of every rank, as tensors and numbers. All ranks call it together."""
        return {"between_epochs": self._between_epochs(), "ranks": gather_objects(rng_state())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore this rank's generators, now or when the epoch goes on."""
        rank, world = rank_and_world()
        saved = state_dict["ranks"]
        if len(saved) != world:
            log.warning(
                "the random state was saved by %d ranks, this run has %d: dropout will differ", len(saved), world
            )
        if rank >= len(saved):
            return
        self._pending = saved[rank]
        set_rng_state(saved[rank])
        if state_dict["between_epochs"]:
            self._pending = None

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Resumed before the first batch of an epoch whose loader had started."""
        self._restore()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Resumed between two batches."""
        self._restore()
        self._ran_batches = True

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Resumed after the last batch, before validation."""
        if not trainer.sanity_checking:
            self._restore()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Resumed after the last batch, without validation."""
        self._restore()

    def _restore(self) -> None:
        if self._pending is not None:
            set_rng_state(self._pending)
            self._pending = None

    def _between_epochs(self) -> bool:
        if self._trainer is None or not self._ran_batches:
            return False
        # Lightning declares a base class here that lacks the two counters.
        epochs: Any = self._trainer.fit_loop.epoch_progress.current
        return epochs.processed >= epochs.started


def rng_state() -> dict[str, Any]:
    """The global generators' states: tensors, numbers and None only, so that a checkpoint loads with `weights_only`."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, next_gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        },
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": next_gauss},
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Put back what `rng_state` returned; CUDA generators as far as this machine has the devices."""
    torch.set_rng_state(state["torch"].cpu())
    for device, saved in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(saved.cpu(), device)
    legacy = state["numpy"]
    keys = legacy["keys"].cpu().numpy().astype(np.uint32)
    np.random.set_state((legacy["name"], keys, legacy["position"], legacy["has_gauss"], legacy["gauss"]))
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
