"""Step policies: how many, and which, masked positions of a block one forward pass commits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class StepPolicy(Protocol):
    """Chooses the positions that a forward pass commits."""

    def select(self, score: Tensor, masked: Tensor, block_masks: Tensor, step: Tensor) -> Tensor:
        """Positions to commit, bool [B, b]; never an unmasked one, at least one in every row that has a mask.

        Args:
            score: float [B, b], higher is committed earlier; its value where `masked` is False means nothing.
            masked: bool [B, b], the positions of the row's current block that are still open.
            block_masks: int64 [B], masks the block held when the row entered it.
            step: int64 [B], forward passes the row has made in this block so far.
        """
        ...


def tokens_at_step(masks: Tensor, step: Tensor, steps: int) -> Tensor:
    """int64 [B]: tokens to commit at `step` (0-based) when `masks` positions are spread evenly over `steps` steps."""
    return masks // steps + (step < masks % steps).long()


def num_transfer_tokens(masks: Tensor, steps: int) -> Tensor:
    """The whole schedule: masks int64 [B] -> int64 [B, steps]; the first `masks % steps` steps commit one more.

    Source: LLaDA, arXiv:2502.09992, sampling with a linear schedule.
    """
    return tokens_at_step(masks[:, None], torch.arange(steps, device=masks.device)[None], steps)


def best_positions(score: Tensor, eligible: Tensor, count: Tensor) -> Tensor:
    """The `count` best eligible positions of each row; the leftmost of equals first, on every device.

    Args:
        score: float [B, b].
        eligible: bool [B, b].
        count: int64 [B]; rows with fewer eligible positions give all of them.

    Returns:
        bool [B, b].
    """
    order = score.masked_fill(~eligible, float("-inf")).argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(score.shape[1], device=score.device).expand_as(order)
    )
    return (rank < count[:, None]) & eligible


@dataclass(frozen=True)
class EvenSchedule:
    """Spread a block's masks evenly over `steps` forward passes. A block of fewer masks than steps ends early."""

    steps: int

    def select(self, score: Tensor, masked: Tensor, block_masks: Tensor, step: Tensor) -> Tensor:
        """See `StepPolicy.select`."""
        return best_positions(score, masked, tokens_at_step(block_masks, step, self.steps))
