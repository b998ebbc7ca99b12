"""What a run computes on."""

from __future__ import annotations

import pytest
import torch

from dare_lightning.cli.devices import accelerator
from dare_lightning.cli.errors import UserError


@pytest.fixture
def apple(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose only GPU is Apple's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)


@pytest.mark.usefixtures("apple")
def test_auto_never_takes_a_device_without_float64() -> None:
    assert accelerator("auto") == "cpu"


@pytest.mark.usefixtures("apple")
@pytest.mark.parametrize("asked", ["mps", "gpu"])
def test_a_device_without_float64_is_refused(asked: str) -> None:
    with pytest.raises(UserError, match=f"trainer.accelerator={asked}.*no float64.*trainer=cpu"):
        accelerator(asked)


def test_a_gpu_that_is_not_there_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="no CUDA device here; use trainer=cpu"):
        accelerator("gpu")


def test_auto_takes_a_cuda_device_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert accelerator("auto") == "cuda"
    assert accelerator("cpu") == "cpu"
