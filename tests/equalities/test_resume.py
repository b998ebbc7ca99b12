from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.equalities.conftest import Keep, Online, weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


POINTS = ["inside-1", "inside-3", "inside-4", "boundary-4", "inside-5", "inside-7", "boundary-8"]


@pytest.mark.parametrize("point", POINTS)
def test_resume_equals_an_uninterrupted_run(setting: Callable[..., Any], tmp_path: Path, point: str) -> None:
    step = int(point.split("-")[1])
    whole, kept = setting(), Keep(tmp_path, at=[step])
    whole.fit(kept)
    resumed, again = setting(), Keep(tmp_path)
    trainer = resumed.fit(again, ckpt_path=tmp_path / f"{point}.ckpt")
    assert trainer.global_step == 8
    assert again.seen == [batch for batch in kept.seen if batch[0] >= step]
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)


def test_every_sample_is_used_once_an_epoch(tmp_path: Path) -> None:
    run, kept = Online(), Keep(tmp_path)
    run.fit(kept)
    inner_epoch = [index for _, samples, _ in kept.seen[:4] for index in samples]
    assert sorted(inner_epoch) == list(range(16))


def test_a_missing_checkpoint_is_an_error(setting: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none.ckpt"):
        setting().fit(ckpt_path=tmp_path / "none.ckpt")
