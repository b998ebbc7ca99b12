"""Where the end of a run can be seen coming, the state it ends with is validated, once."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch

from dare_lightning.callbacks.budget import Budget
from dare_lightning.callbacks.last_validation import LastValidation
from tests.equalities.conftest import Offline, Online, Record, weights

# Both run two epochs of four optimiser steps.
ENDS: dict[str, dict[str, Any]] = {
    "epochs": {},
    "steps inside an epoch": {"max_steps": 3},
    "steps with an epoch": {"max_steps": 4},
}
KINDS = {"online": (Online, {}, "val/solve_rate"), "offline": (Offline, {"val_count": 4}, "val/loss")}


@pytest.mark.parametrize(("kind", "end", "every"), [("online", "steps inside an epoch", 5), ("offline", "epochs", 1)])
def test_validation_changes_nothing_of_the_training(kind: str, end: str, every: int) -> None:
    build, settings, _ = KINDS[kind]
    run, plain = build(**settings), build(**settings)
    ended = run.fit(LastValidation(), check_val_every_n_epoch=every, **ENDS[end])
    other = plain.fit(check_val_every_n_epoch=5, **ENDS[end])
    assert (other.global_step, other.current_epoch) == (ended.global_step, ended.current_epoch)
    torch.testing.assert_close(weights(run), weights(plain), rtol=0, atol=0)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("every", [1, 5])
def test_the_last_state_is_validated_once(end: str, every: int) -> None:
    build, settings, metric = KINDS["offline"]
    record = Record()
    build(**settings).fit(LastValidation(), logger=record, check_val_every_n_epoch=every, **ENDS[end])
    validated = [step for step, values in record.steps.items() if metric in values]
    assert len(record.series(metric)) == (2 if end == "epochs" and every == 1 else 1)
    assert validated[-1] == max(record.steps)


class StopOnce(L.Callback):
    """Asks for an end at the first batch, and takes it back when the next epoch begins."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.should_stop = trainer.current_epoch == 0

    def on_train_epoch_start(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.should_stop = False


def test_the_interval_holds_again_where_a_run_goes_on_after_all() -> None:
    record = Record()
    run = Offline(val_count=4)
    ended = run.fit(
        *(StopOnce(), LastValidation()), logger=record, check_val_every_n_epoch=5, min_epochs=4, max_epochs=4
    )
    assert ended.current_epoch == 4
    # Epoch 0, whose end was announced, and the real end; not the two between.
    assert len(record.series("val/loss")) == 2


def test_the_state_with_which_a_budget_is_spent_is_validated() -> None:
    record = Record()
    Online().fit(Budget(max_passes=1), LastValidation(), logger=record, check_val_every_n_epoch=5)
    assert len(record.series("val/solve_rate")) == 1


def test_validation_by_batches_is_left_as_it_is() -> None:
    record = Record()
    options: dict[str, Any] = {"check_val_every_n_epoch": None, "val_check_interval": 4}
    ended = Offline(val_count=4).fit(LastValidation(), logger=record, **options)
    assert ended.check_val_every_n_epoch is None
    assert len(record.series("val/loss")) == 3
