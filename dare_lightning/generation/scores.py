"""How early a proposed token should be committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol, get_args

import torch
from torch import Tensor

from dare_lightning.generation.sampling import chosen_log_probs, without_tokens
from dare_lightning.generation.schedule import Place, Plan

Order = Literal["low_confidence", "topk_margin", "entropy", "random"]
ORDERS: tuple[str, ...] = get_args(Order)

_LAST = -1e30
"""Below every score, and still a number under any noise of an order temperature."""


class Score(Protocol):
    """How early a proposed token should be committed."""

    @property
    def random(self) -> bool:
        """Whether `uniform` is needed."""
        ...

    def score(self, logits: Tensor, tokens: Tensor, uniform: Tensor | None, log_probs: Tensor | None = None) -> Tensor:
        """float [N], higher is earlier.

        Args:
            logits: float [N, V], at least float32.
            tokens: int64 [N], the proposals.
            uniform: float64 [N] in [0, 1), where the score is random.
            log_probs: float [N], log softmax of these logits at the tokens; None where it is not known yet.
        """
        ...


@dataclass(frozen=True)
class Confidence:
    """The probability of the proposed token (`low_confidence` remasking)."""

    random: bool = False

    def score(self, logits: Tensor, tokens: Tensor, uniform: Tensor | None, log_probs: Tensor | None = None) -> Tensor:
        """See `Score.score`; in [0, 1]."""
        return (chosen_log_probs(logits, tokens) if log_probs is None else log_probs).exp()


@dataclass(frozen=True)
class Margin:
    """By how much the most likely token is more probable than the second (`topk_margin`)."""

    random: bool = False

    def score(self, logits: Tensor, tokens: Tensor, uniform: Tensor | None, log_probs: Tensor | None = None) -> Tensor:
        """See `Score.score`; in [0, 1]."""
        best = logits.softmax(-1).topk(2, dim=-1).values
        return best[:, 0] - best[:, 1]


@dataclass(frozen=True)
class NegativeEntropy:
    """How far the distribution is from uniform: sum p log(p + 1e-10), at most 0 (`entropy`)."""

    random: bool = False

    def score(self, logits: Tensor, tokens: Tensor, uniform: Tensor | None, log_probs: Tensor | None = None) -> Tensor:
        """See `Score.score`; at most 0."""
        probabilities = logits.softmax(-1)
        return (probabilities * (probabilities + 1e-10).log()).sum(-1)


@dataclass(frozen=True)
class RandomOrder:
    """A uniform draw (`random` remasking)."""

    random: bool = True

    def score(self, logits: Tensor, tokens: Tensor, uniform: Tensor | None, log_probs: Tensor | None = None) -> Tensor:
        """See `Score.score`; in [0, 1)."""
        if uniform is None:
            raise ValueError("a random order needs one uniform number for each position, got none")
        return uniform


@dataclass(frozen=True)
class DeferredEnds:
    """Another score, with every end token after every other token.

    The other tokens are compared as if end tokens had no probability. LLaDA's appendix means this; its code looks at
    the noisy logits for one of the two end tokens and misses it at a temperature above 0. At 0 the two agree.
    """

    inner: Score
    stop_token_ids: tuple[int, ...]

    @property
    def random(self) -> bool:
        """Whether `uniform` is needed."""
        return self.inner.random

    def score(self, logits: Tensor, tokens: Tensor, uniform: Tensor | None, log_probs: Tensor | None = None) -> Tensor:
        """See `Score.score`; end tokens lie below everything: entropies may be large, probabilities underflow to 0."""
        ends = torch.isin(tokens, tokens.new_tensor(self.stop_token_ids))
        score = self.inner.score(without_tokens(logits, self.stop_token_ids), tokens, uniform)
        return score.masked_fill(ends, _LAST)


def score_of(order: Order) -> Score:
    """The score of this name."""
    scores: dict[str, Score] = {
        "low_confidence": Confidence(),
        "topk_margin": Margin(),
        "entropy": NegativeEntropy(),
        "random": RandomOrder(),
    }
    return scores[order]


def perturbed(score: Tensor, temperature: float, uniform: Tensor) -> Tensor:
    """Scores whose k best are k draws without replacement from softmax(score / temperature), row by row.

    Gumbel noise makes them that. Shapes [n, G]; uniform in [0, 1).

    Source: Dream's `alg_temp`, which calls a multinomial draw.
    """
    noise = -(-uniform.clamp(min=torch.finfo(uniform.dtype).tiny).log()).log()
    return score.double() / temperature + noise


class EndScore(Protocol):
    """Another score for proposals of the end-of-text token."""

    @property
    def contested(self) -> bool:
        """Whether end-of-text tokens that are written compete with the proposals for a place in the step."""
        ...

    def check(self, steps: int) -> None:
        """Refuse a plan of so many steps (0: none is planned): ValueError."""
        ...

    def adjust(self, score: Tensor, ends: Tensor, place: Place, steps: int) -> Tensor:
        """Scores float [n, G] with those changed where `ends`, bool [n, G], says that the proposal is the end."""
        ...


@dataclass(frozen=True)
class EndRejection:
    """Scale the confidence of the end-of-text token by a factor that grows during the denoising (EOSER).

    Args:
        minimum, maximum: the factor at the first and at the last step, in [0, 1].
        ramp: "linear" in the steps, or "doubling" as the tokens of an ascending schedule do.
        within_block: count the steps within each block, over those of the whole response: as published code does, the
            factor then never reaches its maximum where there are several blocks.

    Source: EOS early rejection, arXiv:2509.23924.
    """

    minimum: float = 0.4
    maximum: float = 1.0
    ramp: Literal["linear", "doubling"] = "linear"
    within_block: bool = False
    contested: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 <= self.minimum <= self.maximum <= 1:
            raise ValueError(f"minimum={self.minimum}, maximum={self.maximum}: factors must be ordered inside [0, 1]")
        if self.ramp not in ("linear", "doubling"):
            raise ValueError(f"ramp={self.ramp!r} is not one of linear, doubling")

    def check(self, steps: int) -> None:
        """See `EndScore.check`."""
        if steps == 0:
            raise ValueError(
                "EndRejection grows with the planned steps, and this schedule plans none; choose one with steps, such "
                "as the even schedule"
            )

    def factor(self, place: Place, steps: int) -> Tensor:
        """The factor of each row, float64 [n]."""
        step = place.step if self.within_block else place.first_step + place.step
        step = step.clamp(max=steps - 1).double()
        if self.ramp == "doubling":
            grown = 2.0 ** (step + 1 - steps) - 2.0**-steps
        else:
            grown = step / (steps - 1) if steps > 1 else torch.ones_like(step)
        return self.minimum + (self.maximum - self.minimum) * grown

    def adjust(self, score: Tensor, ends: Tensor, place: Place, steps: int) -> Tensor:
        """See `EndScore.adjust`."""
        return torch.where(ends, score * self.factor(place, steps)[:, None].to(score.dtype), score)


@dataclass(frozen=True)
class EndsLast:
    """Give proposals of the end-of-text token no confidence, as DARE's rollouts for evaluation do.

    Args:
        contested: as DARE does, end-of-text tokens that are written already have none either, instead of being out of
            the competition: they may take the place of a proposal, which then stays a mask until the very end.
    """

    contested: bool = False

    def check(self, steps: int) -> None:
        """See `EndScore.check`."""
        if self.contested and steps == 0:
            raise ValueError("EndsLast(contested=true) needs a schedule with planned steps, such as the even one")

    def adjust(self, score: Tensor, ends: Tensor, place: Place, steps: int) -> Tensor:
        """See `EndScore.adjust`."""
        # What is deferred already stays where it is.
        return torch.where(ends, score.clamp(max=0.0), score)


def contested(
    steps: Plan, score: Tensor, open_: Tensor, written: Tensor, place: Place, columns: Sequence[range]
) -> Tensor:
    """What `EndsLast(contested=True)` commits, bool [n, G]: see there.

    Equal scores are ordered as `torch.topk` orders them within the block, which is what published code leaves it to.

    Args:
        score: float [n, G].
        open_: bool [n, G], the masks of each row's block.
        written: bool [n, G], the end-of-text tokens that are written in that block.
        columns: the columns of each row's block.
    """
    quota = steps.masks_left(replace(place, step=place.step - 1)) - steps.masks_left(place)
    chosen = torch.zeros_like(open_)
    for row, count in enumerate(quota.tolist()):
        block = slice(columns[row].start, columns[row].stop)
        confidence = torch.where(
            written[row, block], 0.0, score[row, block].masked_fill(~open_[row, block], -torch.inf)
        )
        chosen[row, block][confidence.topk(count).indices] = True
    return chosen & open_
