"""The end of a run: numbers, curve, resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest

from dare_lightning.callbacks.rng_state import RngState
from dare_lightning.callbacks.summary import Summary
from tests.callbacks.toy import Toy, loader, trainer


class Reward(L.Callback):
    """Logs at the end of the epoch, as a rollout does."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.log("rollout/reward", float(trainer.current_epoch))


class Saver(L.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


def fit(folder: Path, *callbacks: L.Callback, epochs: int = 3, **settings: Any) -> L.Trainer:
    runner = trainer(folder, callbacks=list(callbacks), max_epochs=epochs)
    runner.fit(Toy(), loader(), loader(), **settings)
    return runner


def test_gain_and_text_from_a_toy_history(tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    summary = Summary(model_dir=str(tmp_path / "export"), next_commands=["python -m dare_lightning generate"])
    for done, value in ((0, 0.5), (2, 0.625), (4, 0.75)):
        summary.record("val/solve_rate", done, value)
    summary.record("rollout/reward", 4, 0.25)
    text = summary.text(trainer(tmp_path))
    assert summary.gain() == (0.5, 0.75)
    assert "held out  val/solve_rate 0.5 -> 0.75 (+0.25, after 0 -> 4 rollouts)" in text
    assert "training  rollout/reward 0.25 (after 4 rollouts)" in text
    assert str(tmp_path / "export") in text
    assert text.endswith("Next:\n  python -m dare_lightning generate")


@pytest.mark.parametrize("summary_first", [True, False])
def test_the_history_follows_what_is_logged(tmp_path: Path, summary_first: bool) -> None:
    summary = Summary()
    fit(tmp_path, *([summary, Reward()] if summary_first else [Reward(), summary]))
    assert summary.history["rollout/reward"] == {1: 0.0, 2: 1.0, 3: 2.0}
    assert summary.history["val/solve_rate"] == pytest.approx({1: 0.1, 2: 0.2, 3: 0.3})


def test_a_validation_before_training_is_the_start(tmp_path: Path) -> None:
    summary = Summary()
    runner = trainer(tmp_path, callbacks=[summary])
    runner.validate(Toy(), loader(), verbose=False)
    runner.fit(Toy(), loader(), loader())
    assert list(summary.history["val/solve_rate"]) == [0, 1, 2]


def test_epochs_without_validation_add_no_held_out_value(tmp_path: Path) -> None:
    summary = Summary()
    runner = trainer(tmp_path, callbacks=[summary], max_epochs=4, check_val_every_n_epoch=2)
    runner.fit(Toy(), loader(), loader())
    assert list(summary.history["val/solve_rate"]) == [2, 4]


def test_a_resumed_run_has_the_whole_curve(tmp_path: Path) -> None:
    whole, resumed = Summary(), Summary()
    fit(tmp_path, whole, Reward(), RngState(), Saver(tmp_path / "x.ckpt"), epochs=4)
    fit(tmp_path, resumed, Reward(), RngState(), epochs=4, ckpt_path=tmp_path / "x.ckpt")
    assert resumed.history == whole.history
    assert len(resumed.history["rollout/reward"]) == 4


def test_the_end_is_printed_with_the_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, Summary(), Reward())
    output = capsys.readouterr().out
    assert "Done: 3 rollouts, 12 optimiser steps" in output
    assert str(tmp_path / "curve.png") in output
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_logged_nothing_ends_quietly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, Summary(train_metrics=["a"], held_out_metrics=["b"]))
    assert not (tmp_path / "curve.png").exists()
    assert "Done: 3 epochs" in capsys.readouterr().out
