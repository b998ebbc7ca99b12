"""Responses that find their own length while they are denoised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from dare_lightning.generation.canvas import Canvas, first_true
from dare_lightning.generation.schedule import StepPolicy, best_positions


@dataclass(frozen=True)
class Outcome:
    """What a forward pass of n rows found and did.

    Attributes:
        rows: int64 [n], rows of the canvas.
        open_: bool [n, G], the masks of each row's block before the pass.
        masked: bool [n, G], all masks before the pass.
        chosen: bool [n, G], what was committed.
        score: float [n, G], of the proposals; means nothing where nothing was proposed.
        ends: float [n, G], the probability of the end-of-text token where it is the most likely one, 0 elsewhere and
            where the rows were not measured.
    """

    rows: Tensor
    open_: Tensor
    masked: Tensor
    chosen: Tensor
    score: Tensor
    ends: Tensor


class LengthPolicy(Protocol):
    """Decides how long each response is; rows begin with `initial` masks and have at most as many as the canvas."""

    @property
    def initial(self) -> int:
        """Masks at the beginning."""
        ...

    @property
    def probes(self) -> bool:
        """Whether rows begin by finding a length, before anything is committed."""
        ...

    def measured(self, canvas: Canvas, rows: Tensor) -> Tensor:
        """bool [n]: the rows whose length may change, so that all their columns are looked at."""
        ...

    def adjust(self, canvas: Canvas, outcome: Outcome, mask_token_id: int, eos_token_id: int) -> None:
        """Change lengths after a pass."""
        ...


@dataclass(frozen=True)
class Daedal:
    """Grow until the end is in sight, then make room where the policy is unsure.

    First the response grows by `expansion` masks a pass until its end score reaches `sufficient`, and a tail of
    window / 2 end-of-text tokens is put behind it. Then, while its end score is below `complete`, each pass replaces
    the one mask of the block it is least sure of, if less than `unsure`, by `expansion` masks.

    The end score is the sum of p(end of text) over the last `window` columns whose most likely token it is, divided
    by `window`.

    Args:
        initial: masks at the beginning.
        expansion: masks added at a time.
        window: columns of the end score.
        sufficient, complete, unsure: in [0, 1].

    Source: DAEDAL, arXiv:2508.00819.
    """

    initial: int = 64
    expansion: int = 8
    window: int = 32
    sufficient: float = 0.5
    complete: float = 0.9
    unsure: float = 0.1
    probes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_counts(initial=self.initial, expansion=self.expansion, window=self.window)
        _check_shares(sufficient=self.sufficient, complete=self.complete, unsure=self.unsure)

    def measured(self, canvas: Canvas, rows: Tensor) -> Tensor:
        """See `LengthPolicy.measured`."""
        return canvas.length[rows] < canvas.masked.shape[1]

    def adjust(self, canvas: Canvas, outcome: Outcome, mask_token_id: int, eos_token_id: int) -> None:
        """See `LengthPolicy.adjust`."""
        assert canvas.probing is not None  # made with the canvas
        rows, length, longest = outcome.rows, canvas.length[outcome.rows], canvas.masked.shape[1]
        score = end_score(outcome.ends, self.window)
        probing = canvas.probing[rows]
        found = probing & (score >= self.sufficient)
        growing = probing & ~found
        canvas.resize(rows[growing], length[growing] + self.expansion, mask_token_id)
        canvas.resize(rows[found], length[found] + self.window // 2, eos_token_id, masks=False)
        canvas.probing[rows] = growing & (canvas.length[rows] < longest)
        left = outcome.open_ & ~outcome.chosen
        doubtful = left & (outcome.score < self.unsure)
        worst = best_positions(-outcome.score, doubtful, torch.ones_like(length))
        widened = ~probing & (score < self.complete) & (length < longest) & worst.any(1)
        canvas.insert(rows[widened], first_true(worst[widened]), self.expansion - 1, mask_token_id)


@dataclass(frozen=True)
class RhoEos:
    """Keep the share of masks that will be end-of-text tokens within a band: append masks below it, cut above it.

    Args:
        initial: masks at the beginning.
        expansion: masks appended or cut, times a factor that grows with every tenth that the share is off.
        growth: of the factor: "const" 1, "linear" 1, 2, 3, ..., or "exp" 1, 2, 4, ...; at most 8.
        low, high: the band, ordered inside [0, 1].
        density: "predicted", the share of the masks whose most likely token is the end of text, or "tail", the end
            score of `Daedal`, which published code takes in its place.
        window: columns of that end score.
        passes: of the beginning, after which a length is final. So is the greatest length.

    At least one column is kept.

    Source: rho-EOS, arXiv:2601.22527.
    """

    initial: int = 64
    expansion: int = 8
    growth: Literal["const", "linear", "exp"] = "exp"
    low: float = 0.4
    high: float = 0.6
    density: Literal["predicted", "tail"] = "predicted"
    window: int = 32
    passes: int = 64
    probes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_counts(initial=self.initial, expansion=self.expansion, window=self.window, passes=self.passes)
        if not 0 <= self.low <= self.high <= 1:
            raise ValueError(f"low={self.low}, high={self.high}: the band must be ordered inside [0, 1]")
        for name, found, allowed in (
            ("growth", self.growth, ("const", "linear", "exp")),
            ("density", self.density, ("predicted", "tail")),
        ):
            if found not in allowed:
                raise ValueError(f"{name}={found!r} is not one of {', '.join(allowed)}")

    def measured(self, canvas: Canvas, rows: Tensor) -> Tensor:
        """See `LengthPolicy.measured`."""
        return (canvas.length[rows] < canvas.masked.shape[1]) & (canvas.forward_passes[rows] < self.passes)

    def adjust(self, canvas: Canvas, outcome: Outcome, mask_token_id: int, eos_token_id: int) -> None:
        """See `LengthPolicy.adjust`."""
        rows, length = outcome.rows, canvas.length[outcome.rows]
        # The pass is counted by now.
        changes = (length < canvas.masked.shape[1]) & (canvas.forward_passes[rows] <= self.passes)
        if self.density == "tail":
            density = end_score(outcome.ends, self.window)
        else:
            ends = ((outcome.ends > 0) & outcome.masked).sum(1)
            density = (ends / outcome.masked.sum(1).clamp(min=1)).float()
        change = self.change(density)
        changes &= change != 0
        canvas.resize(rows[changes], (length + change)[changes], mask_token_id)

    def change(self, density: Tensor) -> Tensor:
        """Columns to append (above 0) or to cut (below), int64 [n], for densities float32 [n]."""
        below, above = density < self.low, density > self.high
        gap = torch.where(below, self.low - density, density - self.high)
        tenths = ((gap.clamp(min=0) + 1e-12) / 0.1).ceil().long().clamp(min=1)
        factor = {"const": torch.ones_like(tenths), "linear": tenths, "exp": 2 ** (tenths - 1)}[self.growth]
        size = factor.clamp(max=8) * self.expansion
        return torch.where(below, size, torch.where(above, -size, 0))


def end_score(ends: Tensor, window: int) -> Tensor:
    """Sum of the last `window` values above 0 of each row, divided by `window`: float [n, G] -> float32 [n]."""
    last = (ends > 0).flip(1).cumsum(1).flip(1) <= window
    return ((ends * last).sum(1) / window).float()


def check_lengths(lengths: LengthPolicy, steps: StepPolicy, longest: int) -> None:
    """Refuse what cannot go together.

    Raises:
        ValueError: a policy that plans its steps, or more masks at the beginning than there may ever be.
    """
    if steps.planned:
        raise ValueError(
            f"lengths={type(lengths).__name__} changes how many masks there are, {type(steps).__name__} spreads a "
            "known number over its steps; use schedule=ConfidenceThreshold or ConfidenceFactor"
        )
    if lengths.initial > longest:
        raise ValueError(f"initial={lengths.initial} is more than max_new_tokens={longest}, the most there may be")


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")


def _check_shares(**shares: float) -> None:
    for name, value in shares.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value} must lie in [0, 1]")
