"""A run's last state is always validated."""

from __future__ import annotations

from typing import Any

import lightning as L


class LastValidation(L.Callback):
    """Has the state that a run ends with validated, whatever `trainer.check_val_every_n_epoch` says.

    A run ends with its last epoch, with the optimiser step that reaches `trainer.max_steps`, or where another callback
    asked it to stop before this one sees the batch. Without it, the last numbers a run reports would be those of an
    earlier policy than the one it saves and exports.
    """

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
        if trainer.should_stop or (last_batch and last_epoch):
            trainer.check_val_every_n_epoch = 1
