"""When a run evaluates, and what it refuses before it starts."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from dare_lightning.cli import app
from dare_lightning.evaluation.results import Record
from tests.callbacks.test_opencompass import callback, sudoku
from tests.equalities.conftest import Keep, Online

pytest.importorskip("opencompass", reason="needs OpenCompass: pip install 'dare-lightning[eval]'")


def steps_of(folder: Path) -> list[int]:
    """After how many optimiser steps a run evaluated."""
    return [Record.load(file).step for file in sorted((folder / "evaluations").glob("*.json"))]


def test_a_resumed_run_does_not_repeat_the_evaluation_of_its_checkpoints_step(tmp_path: Path) -> None:
    resumed = tmp_path / "resumed"
    evaluation = partial(callback, {"sudoku": sudoku(limit=1)}, tmp_path, every=3, unit="steps", at_end=False)
    Online().fit(evaluation(), Keep(tmp_path, at=[3]), default_root_dir=tmp_path, max_steps=3)
    Online().fit(evaluation(), ckpt_path=tmp_path / "inside-3.ckpt", default_root_dir=resumed)
    assert (steps_of(tmp_path), steps_of(resumed)) == ([3], [6])


def test_a_score_that_is_monitored_and_not_measured_is_named_before_the_first_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DARE_RUN_DIR", raising=False)
    stop = "{_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: eval/gsm8k}"
    assert app.main(["fit", "trainer=cpu", "logger=none", "eval=[sudoku]", f"+callbacks.stop={stop}"]) == 2
    assert "monitors eval/gsm8k, which is not evaluated" in capsys.readouterr().err
