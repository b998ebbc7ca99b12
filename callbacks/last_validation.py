"""The state that a run ends with is validated, where its end can be seen coming."""

from __future__ import annotations

from typing import Any

import lightning as L


class LastValidation(L.Callback):
    """Has the state of a run's end validated, whatever `trainer.check_val_every_n_epoch` says.

    The end is the last epoch, the optimiser step that reaches `trainer.max_steps`, or the batch in which a callback
    before this one asked to stop, such as a spent budget. Without it, the last numbers a run reports would be those of
    an earlier policy than the one it saves and exports. Not seen coming, and validated as the interval says: an end by
    `trainer.max_time`, or by a callback that stops at the end of an epoch or stands behind this one.
    """

    def __init__(self) -> None:
        self._interval: int | None = None

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Go back to the interval where a run went on after all, as `trainer.min_epochs` may have it."""
        if self._interval is not None:
            trainer.check_val_every_n_epoch, self._interval = self._interval, None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Where this batch is the last, let a validation be due after it."""
        if trainer.check_val_every_n_epoch is None:  # validation goes by batches, which Lightning counts by itself
            return
        if 0 <= trainer.max_steps <= trainer.global_step:
            # In the middle of an epoch Lightning would leave without one.
            trainer.should_stop = True
        last_batch = batch_idx + 1 >= trainer.num_training_batches
        last_epoch = trainer.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= trainer.max_epochs
        if (trainer.should_stop or (last_batch and last_epoch)) and self._interval is None:
            self._interval, trainer.check_val_every_n_epoch = trainer.check_val_every_n_epoch, 1
