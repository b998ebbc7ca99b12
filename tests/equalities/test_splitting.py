"""How an optimiser step is cut into micro-batches changes neither the update nor what is logged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dare_lightning.methods.sft import NORMALIZATIONS
from tests.equalities.conftest import Offline, Online, Record, weights


def _fitted(run: Any, **options: Any) -> tuple[Any, Record]:
    record = Record()
    run.fit(logger=record, **options)
    return run, record


def _assert_same(got: tuple[Any, Record], expected: tuple[Any, Record]) -> None:
    torch.testing.assert_close(weights(got[0]), weights(expected[0]), rtol=1e-6, atol=1e-6)
    for name in sorted(expected[1].names()):
        if name.startswith("train/") and name != "train/ratio_max":  # a maximum over each micro-batch
            assert got[1].series(name) == pytest.approx(expected[1].series(name), rel=1e-6, abs=1e-10), name


@pytest.fixture
def unequal(tmp_path: Path) -> Path:
    """Ten conversations whose answers are 1 to 40 characters long."""
    rows = [{"prompt": f"{i}+{i}=", "completion": "12345678" * 5} for i in range(10)]
    for i, row in enumerate(rows):
        row["completion"] = row["completion"][: 1 + (17 * i) % 40]
    file = tmp_path / "unequal.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def _offline(path: Path, micro_batch: int, normalization: Any) -> Offline:
    return Offline(
        torch.float64,
        normalization,
        path=str(path),
        task=None,
        eos_fill="none",
        max_length=96,
        count=0,
        micro_batch=micro_batch,
    )


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_fine_tuning_on_answers_of_very_different_lengths(unequal: Path, normalization: str) -> None:
    whole = _fitted(_offline(unequal, 4, normalization))
    assert len(whole[1].series("train/loss")) == 6  # of 4, 4 and 2 conversations, twice
    assert min(whole[1].series("train/grad_norm")) > 1e-3
    for micro_batch in (1, 2):
        _assert_same(_fitted(_offline(unequal, micro_batch, normalization)), whole)


def test_a_last_window_of_one_micro_batch_is_divided_by_what_is_in_it() -> None:
    def run(micro_batch: int) -> tuple[Any, Record]:
        return _fitted(Offline(torch.float64, "token", count=5, micro_batch=micro_batch))

    whole, split = run(4), run(1)
    assert len(split[1].series("train/loss")) == 4
    _assert_same(split, whole)


def test_rollouts_split_in_any_way_train_the_same_policy() -> None:
    whole = _fitted(Online(torch.float64, micro_batch=8))
    assert min(whole[1].series("train/grad_norm")) > 1e-3
    for micro_batch in (4, 1):
        _assert_same(_fitted(Online(torch.float64, micro_batch=micro_batch)), whole)


def test_a_gradient_plan_changes_nothing_either() -> None:
    whole = _fitted(Online(torch.float64))
    planned = Online(torch.float64)
    planned.method.gradient_plan, planned.method.rows_per_forward = "replay", 1
    _assert_same(_fitted(planned), whole)
