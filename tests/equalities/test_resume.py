from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.equalities.conftest import Keep, Offline, Online, weights


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


OTHER_SPLITS = pytest.mark.parametrize(
    ("kind", "change"),
    [
        (Online, {"micro_batch": 2}),
        (Offline, {"micro_batch": 1}),
        (Offline, {"batch_size": 6}),
        (Offline, {"count": 15}),
    ],
    ids=["online", "micro_batch", "batch_size", "conversations"],
)


@OTHER_SPLITS
def test_inside_an_epoch_another_split_is_refused(kind: Any, change: dict[str, int], tmp_path: Path) -> None:
    kind().fit(Keep(tmp_path, at=[3]), max_steps=3)
    with pytest.raises(RuntimeError, match="inside an epoch, with .*; this run has .*: resume with what it had"):
        kind(**change).fit(ckpt_path=tmp_path / "inside-3.ckpt")


@OTHER_SPLITS
def test_from_the_end_of_an_epoch_another_split_goes_on(kind: Any, change: dict[str, int], tmp_path: Path) -> None:
    kind(dtype=torch.float64).fit(Keep(tmp_path, at=[4]), max_epochs=1)
    first, second = kind(dtype=torch.float64), kind(dtype=torch.float64, **change)
    kept, others = Keep(tmp_path), Keep(tmp_path)
    steps = first.fit(kept, ckpt_path=tmp_path / "boundary-4.ckpt").global_step
    assert second.fit(others, ckpt_path=tmp_path / "boundary-4.ckpt").global_step <= steps
    samples = {sample for _, batch, _ in others.seen for sample in batch}
    assert len(samples) == sum(len(batch) for _, batch, _ in others.seen) or kind is Online
    if "micro_batch" in change:
        torch.testing.assert_close(weights(second), weights(first), rtol=1e-9, atol=1e-9)


def test_every_sample_is_used_once_an_epoch(tmp_path: Path) -> None:
    run, kept = Online(), Keep(tmp_path)
    run.fit(kept)
    inner_epoch = [index for _, samples, _ in kept.seen[:4] for index in samples]
    assert sorted(inner_epoch) == list(range(16))


def test_a_missing_checkpoint_is_an_error(setting: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none.ckpt"):
        setting().fit(ckpt_path=tmp_path / "none.ckpt")
