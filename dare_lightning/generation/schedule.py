"""Step policies that follow a plan: how many of a block's masks each of its steps commits."""

from __future__ import annotations

import math
import re
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
        fresh: bool [n], whether this pass reads every column of the row; None unless the canvas is `cautious`.
    """

    block_masks: Tensor
    step: Tensor
    steps: Tensor
    first_step: Tensor
    fresh: Tensor | None = None


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

    @property
    def needs_random_order(self) -> bool:
        """Whether scores must be uniform draws; such a policy may choose nothing, and the step then needs no pass."""
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
    needs_random_order: ClassVar[bool] = False

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


@dataclass(frozen=True)
class MaskRatioSchedule(Plan):
    """Keep a share of a block's masks that falls along a curve: after step i of s, floor(n · curve((i + 1) / s)).

    Args:
        curve: "linear" 1 - r, "cosine" cos(pi r / 2), "log" -log2(r) / log2(n), "exp" 1 - 2^(-log2(n) (1 - r)), or
            "pow" with an exponent p, such as "pow2": 1 - r^p.

    Source: MaskGIT, arXiv:2202.04200, section 3.3; the curves of MDPO, arXiv:2508.13148.
    """

    curve: str = "cosine"

    def __post_init__(self) -> None:
        _curve(self.curve, 2, 1.0)

    def masks_left(self, place: Place) -> Tensor:
        """See `Plan.masks_left`."""
        # In Python's own floats: the published floors hang on their rounding.
        columns = zip(place.block_masks.tolist(), place.step.tolist(), place.steps.tolist(), strict=True)
        return torch.tensor([self._left(*row) for row in columns], device=place.step.device)

    def _left(self, masks: int, step: int, steps: int) -> int:
        if step >= steps - 1 or masks == 0:
            return 0
        return math.floor(masks * _curve(self.curve, masks, (step + 1) / steps))


def _curve(name: str, masks: int, ratio: float) -> float:
    """Share of the masks that is left when this share of the steps is done; both in [0, 1]."""
    if name == "linear":
        return 1.0 - ratio
    if name == "cosine":
        return math.cos(math.pi / 2 * ratio)
    if name in ("log", "exp") and masks == 1:
        return 1.0 - ratio
    if name == "log":
        return min(1.0, -math.log2(ratio) / math.log2(masks))
    if name == "exp":
        return float(1.0 - 2.0 ** (-math.log2(masks) * (1.0 - ratio)))
    exponent = _number(name.removeprefix("pow")) if name.startswith("pow") else 0.0
    if exponent <= 0:
        raise ValueError(f"curve={name!r} is not one of linear, cosine, log, exp, or pow with an exponent such as pow2")
    return float(1.0 - ratio**exponent)


def _number(text: str) -> float:
    """A finite number, or 0 where the text is none."""
    return float(text) if re.fullmatch(r"\d+(\.\d*)?|\.\d+", text) else 0.0


@dataclass(frozen=True)
class AscendingSchedule(Plan):
    """Commit 2^j tokens at step j, and at the last one all that are left: floor(log2 G) steps.

    Args:
        blocks: of lengths that fit: from the right one step each, and the first block takes the steps that remain.

    Source: ascending step sizes (ASS), arXiv:2509.23924.
    """

    blocks: int = 1

    def layout(self, new_tokens: int, block_length: int | None, steps: int | None) -> Layout:
        """See `StepPolicy.layout`."""
        needed = new_tokens.bit_length() - 1
        if needed < 1:
            raise ValueError(f"max_new_tokens={new_tokens} is too short for an ascending schedule; at least 2")
        if steps is not None and steps != needed:
            raise ValueError(
                f"steps={steps}: an ascending schedule of max_new_tokens={new_tokens} takes exactly {needed} steps, "
                f"floor(log2({new_tokens})); set steps to {needed} or null"
            )
        if block_length is not None:
            raise ValueError(
                f"block_length={block_length}: an ascending schedule cuts blocks that fit its steps; set block_length "
                "to null and AscendingSchedule.blocks to their number"
            )
        if not 1 <= self.blocks <= needed:
            raise ValueError(f"blocks={self.blocks} must lie in 1 to {needed}, the number of steps")
        first_steps = (0, *range(needed - self.blocks + 1, needed + 1))
        written = [2**step - 1 for step in first_steps[:-1]] + [new_tokens]
        return Layout(tuple(written), first_steps)

    def masks_left(self, place: Place) -> Tensor:
        """See `Plan.masks_left`."""
        written = 2 ** (place.first_step + place.step + 1) - 2**place.first_step
        return torch.where(place.step >= place.steps - 1, 0, place.block_masks - written)


class DreamTimes:
    """Steps along t = linspace(1, eps): step i unmasks with probability 1 - t_(i+1) / t_i, the last one everything."""

    planned: ClassVar[bool] = True
    compares_probabilities: ClassVar[bool] = False
    needs_random_order: ClassVar[bool] = False
    eps: float

    def layout(self, new_tokens: int, block_length: int | None, steps: int | None) -> Layout:
        """See `StepPolicy.layout`; without `steps` as many as there are tokens."""
        if not 0 <= self.eps < 1:
            raise ValueError(f"eps={self.eps} must lie in [0, 1)")
        block = new_tokens if block_length is None else block_length
        return even_layout(new_tokens, block, new_tokens if steps is None else steps)

    def probability(self, step: Tensor, steps: Tensor) -> Tensor:
        """float32 [n]; 1 at the last step. Every block has the same number of steps."""
        count = int(steps[0])
        times = torch.linspace(1, self.eps, count + 1, device=step.device)
        ratio = 1 - times[1:] / times[:-1]
        ratio[-1] = 1.0
        return ratio[step.clamp(max=count - 1)]


@dataclass(frozen=True)
class DreamSchedule(DreamTimes):
    """Commit that share of a row's masks, rounded down; steps that would commit nothing cost nothing.

    Published code takes the mean number of masks of a batch for every row; each row has its own here.

    Args:
        eps: where time ends.

    Source: Dream 7B, arXiv:2508.15487, `diffusion_generate`.
    """

    eps: float = 1e-3

    def idle(self, masks: Tensor, place: Place) -> Tensor | None:
        """See `StepPolicy.idle`."""
        skipped = torch.zeros_like(masks)
        while True:
            stuck = self._count(masks, place.step + skipped, place.steps) == 0
            if not bool(stuck.any()):
                return skipped
            skipped += stuck

    def select(self, score: Tensor, open_: Tensor, place: Place) -> Tensor:
        """See `StepPolicy.select`."""
        return best_positions(score, open_, self._count(open_.sum(1), place.step, place.steps))

    def _count(self, masks: Tensor, step: Tensor, steps: Tensor) -> Tensor:
        return (masks.float() * self.probability(step, steps)).long()


@dataclass(frozen=True)
class OriginSchedule(DreamTimes):
    """Commit every mask with that probability, whatever its score (Dream's `origin`); needs a random order.

    Args:
        eps: where time ends.

    Source: Dream 7B, arXiv:2508.15487, `diffusion_generate`.
    """

    eps: float = 1e-3
    needs_random_order: ClassVar[bool] = True

    def idle(self, masks: Tensor, place: Place) -> Tensor | None:
        """See `StepPolicy.idle`: it is drawn, not planned."""
        return None

    def select(self, score: Tensor, open_: Tensor, place: Place) -> Tensor:
        """See `StepPolicy.select`; the score is a uniform draw."""
        return open_ & (score < self.probability(place.step, place.steps)[:, None])
