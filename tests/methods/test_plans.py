"""Where a gradient plan does not give the gradient."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from dare_lightning.methods.plans import check_accumulation


def _trainer(precision: Any, scaler: torch.amp.GradScaler | None) -> L.Trainer:
    plugin = MixedPrecision(precision, "cpu", scaler)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(accelerator="cpu", devices=1, plugins=[plugin], **options)


def test_accumulating_under_a_loss_scale_is_refused() -> None:
    trainer = _trainer("16-mixed", torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="trainer.precision=16-mixed.*use trainer.precision=bf16-mixed, or"):
        check_accumulation(trainer)


def test_accumulating_without_a_loss_scale_is_not() -> None:
    check_accumulation(_trainer("bf16-mixed", None))
