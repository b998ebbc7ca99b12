"""A LightningModule that trains in milliseconds, with dropout from the global generator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Toy(L.LightningModule):
    """A linear layer behind dropout; logs the names that real methods log."""

    def __init__(self, on_step: Callable[[int], None] = lambda step: None) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1))
        self.on_step = on_step

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.on_step(self.global_step)
        loss = self.layer(batch[0]).square().mean()
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val/solve_rate", (self.current_epoch + 1) / 10)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ResumableLoader(DataLoader[Any]):
    """A torch loader (which draws a number when it starts) that goes on at the batch where it was saved."""

    seen = 0
    skip = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = super().__iter__()
        self.seen, self.skip = self.skip, 0
        for batch in islice(batches, self.seen, None):
            self.seen += 1
            yield batch
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip = state["seen"]


def loader() -> ResumableLoader:
    """Four batches of two."""
    return ResumableLoader(TensorDataset(torch.arange(24.0).view(8, 3) / 10), batch_size=2)


def trainer(folder: Any, **settings: Any) -> L.Trainer:
    """A quiet CPU trainer."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "default_root_dir": folder,
    }
    return L.Trainer(**(defaults | settings))
