"""Micro-batches in optimiser-step windows, with the loss denominators of the whole step, resumable at any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from dare_lightning.replay.batch import SequenceBatch

Window = Sequence[Callable[[], SequenceBatch]]
"""The micro-batches of one optimiser step, each made when called."""

START: dict[str, Any] = {"epoch": 0, "position": 0}
"""The state of a loader that nothing was taken from."""


class MicroBatchLoader:
    """Iterates over an epoch's windows; Lightning accumulates one window into one optimiser step.

    A loss is a sum divided by a total over the whole optimiser step: all micro-batches, all ranks. So before the
    first micro-batch of a window goes out, the contributions of all of them are counted and summed over the ranks;
    splitting a batch in another way cannot change the update.

    The position is part of the checkpoint (Lightning calls `state_dict`), so a run resumed inside an epoch goes on
    with the next micro-batch. The epoch is counted here and not read from the trainer, whose counter is already one
    further when a checkpoint is written at the end of an epoch.

    Args:
        windows: epoch number -> its windows, every one but the last of an epoch with the same number of micro-batches.
        length: micro-batches an epoch, the same for every epoch and rank.
        count: micro-batch -> float [D], what it adds to the loss denominators.
        reduce: sums a tensor over the ranks.
    """

    def __init__(
        self,
        windows: Callable[[int], Sequence[Window]],
        length: int,
        count: Callable[[SequenceBatch], Tensor],
        reduce: Callable[[Tensor], Tensor],
    ) -> None:
        self.windows = windows
        self.length = length
        self.count = count
        self.reduce = reduce
        self.epoch = 0
        self.position = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[SequenceBatch]:
        # Lightning stops a sized loader by counting, without running it to exhaustion.
        if self.position >= self.length:
            self.epoch, self.position = self.epoch + 1, 0
        skip = self.position
        for window in self.windows(self.epoch):
            if skip >= len(window):
                skip -= len(window)
                continue
            batches = [make() for make in window]
            counts = [self.count(batch) for batch in batches]
            denominator = self.reduce(sum(counts[1:], start=counts[0]))
            for batch in batches[skip:]:
                self.position += 1
                yield replace(batch, denominator=denominator)
            skip = 0

    def state_dict(self) -> dict[str, Any]:
        """Epoch and position inside it; the end of an epoch is the start of the next, which may be split otherwise."""
        if self.position >= self.length:
            return {"epoch": self.epoch + 1, "position": 0}
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.epoch, self.position = state["epoch"], state["position"]
