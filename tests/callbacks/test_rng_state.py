"""The global random state survives a resume."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch

from dare_lightning.callbacks.rng_state import RngState, rng_state, set_rng_state
from tests.callbacks.toy import Toy, loader, trainer


class SaveAt(L.Callback):
    """Saves once: after a batch, at the end of an epoch, or before the first batch."""

    def __init__(self, when: str, path: Path) -> None:
        self.when = when
        self.path = path

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.when == "start":
            trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if self.when == f"step {trainer.global_step}":
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.when == f"epoch {trainer.current_epoch}":
            trainer.save_checkpoint(self.path)


def fit(folder: Path, *callbacks: L.Callback, resume: Path | None = None, validate: bool = True) -> dict[str, Any]:
    torch.manual_seed(1 if resume is None else 99)
    model = Toy()
    runner = trainer(folder, callbacks=list(callbacks), max_epochs=3)
    runner.fit(model, loader(), loader() if validate else None, ckpt_path=resume)
    assert runner.global_step == 12
    return model.state_dict()


@pytest.mark.parametrize("validate", [True, False], ids=["validated", "unvalidated"])
@pytest.mark.parametrize("first", [True, False], ids=["state_first", "saver_first"])
@pytest.mark.parametrize("when", ["start", "step 2", "step 3", "step 5", "epoch 0", "epoch 1"])
def test_a_resumed_run_draws_the_dropout_of_an_uninterrupted_one(
    tmp_path: Path, when: str, first: bool, validate: bool
) -> None:
    file = tmp_path / "x.ckpt"
    saver = SaveAt(when, file)
    whole = fit(tmp_path, *([RngState(), saver] if first else [saver, RngState()]), validate=validate)
    resumed = fit(tmp_path, RngState(), resume=file, validate=validate)
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


def test_a_checkpoint_saved_at_the_start_of_a_resumed_epoch_resumes_exactly(tmp_path: Path) -> None:
    whole = fit(tmp_path, SaveAt("epoch 0", tmp_path / "a.ckpt"), RngState())
    fit(tmp_path, SaveAt("start", tmp_path / "b.ckpt"), RngState(), resume=tmp_path / "a.ckpt")
    resumed = fit(tmp_path, RngState(), resume=tmp_path / "b.ckpt")
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


def test_every_generator_goes_on_where_it_was() -> None:
    def draw() -> tuple[float, ...]:
        return torch.rand(1).item(), np.random.normal(), random.gauss(0, 1), random.random()

    draw()
    state = rng_state()
    expected = draw()
    set_rng_state(state)
    assert draw() == expected


def test_the_state_loads_as_plain_weights(tmp_path: Path) -> None:
    torch.save(RngState().state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    set_rng_state(loaded["ranks"][0])
    assert torch.equal(torch.get_rng_state(), loaded["ranks"][0]["torch"])


def test_another_number_of_ranks_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    RngState().load_state_dict({"between_epochs": True, "ranks": [rng_state(), rng_state()]})
    assert "saved by 2 ranks, this run has 1" in caplog.text
