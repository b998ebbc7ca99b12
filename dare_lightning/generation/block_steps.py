"""Which masks of its block a forward pass of a block-diffusion policy commits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from dare_lightning.generation.schedule import best_positions


@dataclass(frozen=True)
class BlockPass:
    """What n rows found in their blocks, [n, b] each.

    Attributes:
        masked: bool, the masks that were read.
        confidence: float, the probability of each proposal; read at masks alone.
        entropy: float, in nats, of the distribution it came from; None where nobody asked.
        step: int64 [n], passes the row had made in its block before this one.
    """

    masked: Tensor
    confidence: Tensor
    entropy: Tensor | None
    step: Tensor


class BlockSteps(Protocol):
    """Chooses at least one mask where there is one, and never anything else.

    Attributes:
        needs_entropy: whether `BlockPass.entropy` is read.
        from_the_left: whether masks are taken in their order.
    """

    needs_entropy: ClassVar[bool]
    from_the_left: ClassVar[bool]

    def select(self, found: BlockPass) -> Tensor:
        """The masks to commit, bool [n, b]."""
        ...

    def one_a_pass(self, block_length: int) -> bool:
        """Whether each pass commits exactly one token."""
        ...


def quota(block_length: int, steps: int, step: Tensor) -> Tensor:
    """Tokens due at each step of a block: its length spread over the steps, the first ones one more; int64 [n].

    Steps after the last planned one are due one token.
    """
    each, extra = divmod(block_length, steps)
    return (each + (step < extra).long()).clamp_min(1)


class Quota:
    """A number of tokens due at each pass, from `steps` and the block length."""

    needs_entropy: ClassVar[bool] = False
    from_the_left: ClassVar[bool] = False
    steps: int | None

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps={self.steps} of a block must be at least 1, or null for one token a pass")

    def due(self, found: BlockPass) -> Tensor:
        """Tokens due, at most the masks that are left; int64 [n].

        Published code takes what is due even where fewer masks are left, and overwrites prompt tokens with the rest.
        """
        length = found.masked.shape[1]
        planned = quota(length, length if self.steps is None else self.steps, found.step)
        return torch.minimum(planned, found.masked.sum(1))

    def one_a_pass(self, block_length: int) -> bool:
        """Whether each pass commits exactly one token."""
        return self.steps is None or self.steps >= block_length


@dataclass(frozen=True)
class Sequential(Quota):
    """The first masks from the left.

    Args:
        steps: passes a block is spread over; None for one token a pass.

    Source: `sequential` of SDAR, arXiv:2510.06303.
    """

    steps: int | None = None
    from_the_left: ClassVar[bool] = True

    def select(self, found: BlockPass) -> Tensor:
        """See `BlockSteps.select`."""
        return found.masked & (found.masked.cumsum(1) <= self.due(found)[:, None])


@dataclass(frozen=True)
class MostConfident(Quota):
    """The most confident masks.

    Args:
        steps: passes a block is spread over; None for one token a pass.

    Source: `low_confidence_static` of SDAR, arXiv:2510.06303.
    """

    steps: int | None = None

    def select(self, found: BlockPass) -> Tensor:
        """See `BlockSteps.select`."""
        return best_positions(found.confidence, found.masked, self.due(found))


@dataclass(frozen=True)
class AboveThreshold(Quota):
    """All masks above a confidence, or the most confident ones where fewer are than are due.

    Args:
        threshold: commit what is more likely than this.
        steps: passes a block is spread over, which sets how many tokens are due; None for one token a pass.

    Source: `low_confidence_dynamic` of SDAR, arXiv:2510.06303; LLaDA2's decoding, arXiv:2512.15745, is the same.
    """

    threshold: float = 0.9
    steps: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not math.isfinite(self.threshold):
            raise ValueError(f"threshold={self.threshold} must be a number; above 1 nothing is sure enough")

    def select(self, found: BlockPass) -> Tensor:
        """See `BlockSteps.select`."""
        due = self.due(found)
        sure = found.masked & (found.confidence > self.threshold)
        enough = sure.sum(1) >= due
        return torch.where(enough[:, None], sure, best_positions(found.confidence, found.masked, due))

    def one_a_pass(self, block_length: int) -> bool:
        """Whether each pass commits exactly one token: not where several may be sure."""
        return self.threshold >= 1 and super().one_a_pass(block_length)


@dataclass(frozen=True)
class ConstantQuota(AboveThreshold):
    """All masks above a confidence, or the `least` most confident ones.

    Args:
        threshold: commit what is more likely than this.
        least: tokens committed at every pass, where there are so many masks.

    Source: `num_to_transfer` of LLaDA2.1, arXiv:2602.08676.
    """

    least: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least < 1 or self.steps is not None:
            raise ValueError(f"least={self.least} must be at least 1, and steps={self.steps} null: it is not planned")

    def due(self, found: BlockPass) -> Tensor:
        """`least`, or the masks that are left."""
        return found.masked.sum(1).clamp_max(self.least)

    def one_a_pass(self, block_length: int) -> bool:
        """Whether each pass commits exactly one token."""
        return self.least == 1 and super().one_a_pass(block_length)


@dataclass(frozen=True)
class EntropyBounded:
    """The masks of lowest entropy as long as their entropies sum to less than a bound, and always the lowest.

    Args:
        bound: in nats, above 0.

    Source: Ben-Hamu et al. 2025, arXiv:2505.24857, as in the decoder of TraceRL.
    """

    bound: float = 0.4
    needs_entropy: ClassVar[bool] = True
    from_the_left: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.bound > 0:
            raise ValueError(f"bound={self.bound} must be above 0; it is compared with entropies in nats")

    def select(self, found: BlockPass) -> Tensor:
        """See `BlockSteps.select`."""
        assert found.entropy is not None  # `needs_entropy` asks for it
        ordered = found.entropy.masked_fill(~found.masked, torch.inf).sort(1).values
        count = (ordered.cumsum(1) < self.bound).sum(1).clamp_min(1)
        return best_positions(-found.entropy, found.masked, count)

    def one_a_pass(self, block_length: int) -> bool:
        """It depends on the entropies."""
        return False
