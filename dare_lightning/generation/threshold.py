"""Step policies that commit what the policy is sure of: the number of steps depends on the data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dare_lightning.generation.layout import Layout, even_layout
from dare_lightning.generation.schedule import Place, best_positions, ranks


class Unplanned:
    """A policy whose number of steps is not known beforehand; every pass commits at least one token."""

    planned: ClassVar[bool] = False
    compares_probabilities: ClassVar[bool] = True
    needs_random_order: ClassVar[bool] = False

    def layout(self, new_tokens: int, block_length: int | None, steps: int | None) -> Layout:
        """See `StepPolicy.layout`.

        Raises:
            ValueError: a number of steps, which would not be kept.
        """
        if steps is not None:
            raise ValueError(
                f"steps={steps} means nothing to {type(self).__name__}: how many forward passes it takes depends on "
                "what the policy is sure of; set steps to null"
            )
        return even_layout(new_tokens, new_tokens if block_length is None else block_length, None)

    def idle(self, masks: Tensor, place: Place) -> Tensor | None:
        """See `StepPolicy.idle`."""
        return None


@dataclass(frozen=True)
class ConfidenceThreshold(Unplanned):
    """Commit every position at least this sure, and always the surest.

    Args:
        threshold: in [0, 1].

    Source: Fast-dLLM, arXiv:2505.22618, confidence-aware parallel decoding.
    """

    threshold: float = 0.9

    def __post_init__(self) -> None:
        _check_share("threshold", self.threshold)

    def select(self, score: Tensor, open_: Tensor, place: Place) -> Tensor:
        """See `StepPolicy.select`."""
        return surest_and(score >= self.threshold, score, open_)


@dataclass(frozen=True)
class ConfidenceFactor(Unplanned):
    """Commit the longest run of the surest positions whose r-th is at least 1 - factor / (r + 1) sure.

    The surest is always committed.

    Args:
        factor: above 0; larger commits more.
        accept_last_refused: as published code does, the last position is accepted where it alone is refused.

    Source: Fast-dLLM, arXiv:2505.22618, factor-based parallel decoding.
    """

    factor: float = 1.0
    accept_last_refused: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise ValueError(f"factor={self.factor} must be a finite number above 0")

    def select(self, score: Tensor, open_: Tensor, place: Place) -> Tensor:
        """See `StepPolicy.select`."""
        rank = ranks(score, open_)
        count = open_.sum(1, keepdim=True)
        refused = open_ & (rank > 0) & (score < 1 - self.factor / (rank + 2))
        first = torch.where(refused, rank, open_.shape[1]).amin(1, keepdim=True)
        if self.accept_last_refused:
            first = torch.where(first == count - 1, count, first)
        return open_ & (rank < first)


@dataclass(frozen=True)
class QuotaThreshold:
    """Of an even schedule's share commit what is sure enough, and always the surest; the rest is owed to later steps.

    Passes go on after the planned steps until nothing is owed.

    Args:
        threshold: in [0, 1].

    Source: the `confidence_threshold` algorithm of Fast-dLLM's Dream sampler without a cache, arXiv:2505.22618.
    """

    threshold: float = 0.9
    planned: ClassVar[bool] = True
    compares_probabilities: ClassVar[bool] = True
    needs_random_order: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_share("threshold", self.threshold)

    def layout(self, new_tokens: int, block_length: int | None, steps: int | None) -> Layout:
        """See `StepPolicy.layout`; every step must have the same share."""
        total = new_tokens if steps is None else steps
        if new_tokens % total:
            raise ValueError(
                f"steps={total} does not divide max_new_tokens={new_tokens}: QuotaThreshold gives every step the same "
                "share; choose a divisor"
            )
        return even_layout(new_tokens, new_tokens if block_length is None else block_length, total)

    def idle(self, masks: Tensor, place: Place) -> Tensor | None:
        """See `StepPolicy.idle`."""
        return None

    def select(self, score: Tensor, open_: Tensor, place: Place) -> Tensor:
        """See `StepPolicy.select`."""
        due = place.block_masks * torch.minimum(place.step + 1, place.steps) // place.steps
        owed = due - (place.block_masks - open_.sum(1))
        return surest_and((score >= self.threshold), score, best_positions(score, open_, owed))


def surest_and(sure: Tensor, score: Tensor, open_: Tensor) -> Tensor:
    """The open positions that are sure, and the surest of each row in any case; bool [n, G]."""
    return open_ & (sure | (ranks(score, open_) == 0))


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value} must lie in [0, 1]: it is compared with probabilities")
