"""Wherever a run ends, what it ends with was validated, once."""

from __future__ import annotations

from typing import Any

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


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("every", [1, 5])
def test_the_last_state_is_validated(kind: str, end: str, every: int) -> None:
    build, settings, metric = KINDS[kind]
    run, plain, record = build(**settings), build(**settings), Record()
    ended = run.fit(LastValidation(), logger=record, check_val_every_n_epoch=every, **ENDS[end])
    validated = [step for step, values in record.steps.items() if metric in values]
    epochs = 2 if end == "epochs" else 1
    assert len(record.series(metric)) == (1 if every == 5 else epochs)
    assert validated[-1] == max(record.steps)
    other = plain.fit(check_val_every_n_epoch=5, **ENDS[end])
    assert (other.global_step, other.current_epoch) == (ended.global_step, ended.current_epoch)
    torch.testing.assert_close(weights(run), weights(plain), rtol=0, atol=0)


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
