"""Step policies that follow a plan: how many of a block's masks each of its steps commits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from dare_lightning.generation.layout import Layout, even_layout


@dataclass(frozen=True)
class Place:
    """Where each of n rows stands in its plan.

    Attributes:
        block_masks: int64 [n], masks the block held when the row entered it.
        step: int64 [n], planned steps the row has made in this block.
        steps: int64 [n], planned steps of the block; 0 where no number is planned.
        first_step: int64 [n], planned steps of all blocks before.
    """

    block_masks: Tensor
    step: Tensor
    steps: Tensor
    first_step: Tensor


class StepPolicy(Protocol):
    """Chooses the positions that a forward pass commits."""

    @property
    def planned(self) -> bool:
        """Whether it spreads the masks over a number of steps given beforehand."""
        ...

    @property
    def compares_probabilities(self) -> bool:
        """Whether scores mean something by themselves, not only their order."""
        ...

    def layout(self, new_tokens: int, block_length: int | None, steps: int | None) -> Layout:
        """The blocks; refuses numbers that do not fit (ValueError)."""
        ...

    def idle(self, masks: Tensor, place: Place) -> Tensor | None:
        """Steps from here on that commit nothing and so need no forward pass, int64 [n]; None where that cannot be.

        Args:
            masks: int64 [n], open positions of the row's block.
        """
        ...

    def select(self, score: Tensor, open_: Tensor, place: Place) -> Tensor:
        """Positions to commit, bool [n, G]; never one that is not open.

        Args:
            score: float [n, G], higher is committed earlier; its value where nothing is open means nothing.
            open_: bool [n, G], the masks of the row's block.
            place: where the rows stand.
        """
        ...


def best_positions(score: Tensor, eligible: Tensor, count: Tensor) -> Tensor:
    """The `count` best eligible positions of each row; the leftmost of equals first, on every device.

    Args:
        score: float [B, G].
        eligible: bool [B, G].
        count: int64 [B]; rows with fewer eligible positions give all of them.

    Returns:
        bool [B, G].
    """
    return (ranks(score, eligible) < count[:, None]) & eligible


def ranks(score: Tensor, eligible: Tensor) -> Tensor:
    """Rank from 0 of each position by descending score, eligible ones first; int64 [B, G]."""
    order = score.masked_fill(~eligible, float("-inf")).argsort(dim=1, descending=True, stable=True)
    places = torch.arange(score.shape[1], device=score.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)


class Plan:
    """A policy that knows how many masks each step leaves."""

    planned: ClassVar[bool] = True
    compares_probabilities: ClassVar[bool] = False

    def masks_left(self, place: Place) -> Tensor:
        """Masks of the block after this step, int64 [n]; 0 after the last."""
        raise NotImplementedError

    def layout(self, new_tokens: int, block_length: int | None, steps: int | None) -> Layout:
        """See `StepPolicy.layout`; without `steps` one token a step."""
        block = new_tokens if block_length is None else block_length
        return even_layout(new_tokens, block, new_tokens if steps is None else steps)

    def idle(self, masks: Tensor, place: Place) -> Tensor | None:
        """See `StepPolicy.idle`."""
        skipped = torch.zeros_like(masks)
        while True:
            stuck = self.masks_left(replace(place, step=place.step + skipped)) >= masks
            if not bool(stuck.any()):
                return skipped
            skipped += stuck

    def select(self, score: Tensor, open_: Tensor, place: Place) -> Tensor:
        """See `StepPolicy.select`."""
        return best_positions(score, open_, open_.sum(1) - self.masks_left(place))


@dataclass(frozen=True)
class EvenSchedule(Plan):
    """Spread a block's masks evenly over its steps, the first steps one more. Fewer masks than steps end early.

    Source: LLaDA, arXiv:2502.09992, sampling with a linear schedule.
    """

    def masks_left(self, place: Place) -> Tensor:
        """See `Plan.masks_left`."""
        each, extra = place.block_masks // place.steps, place.block_masks % place.steps
        done = place.step + 1
        return (place.block_masks - done * each - torch.minimum(done, extra)).clamp(min=0)

    def idle(self, masks: Tensor, place: Place) -> Tensor | None:
        """See `StepPolicy.idle`: every step commits something until nothing is left."""
        return None
