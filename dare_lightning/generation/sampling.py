"""From the logits of one position to a token and to how early that token should be committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dare_lightning.diffusion.noise import generator

# What a stream is for: the draws for tokens, for the order and for proposals that are only recorded must not disturb
# each other.
TOKENS = 1
ORDER = 2
RECORD = 3


class RowStreams:
    """One stream of uniform numbers for each row, whatever the other rows do.

    Args:
        seeds: B integers, one for each row.
        purpose: keeps the streams of one seed apart.
    """

    def __init__(self, seeds: Sequence[int], purpose: int) -> None:
        self._seeds = list(seeds)
        self._purpose = purpose
        self._generators = [generator(seed, purpose) for seed in seeds]

    def restart(self, rows: Tensor, salt: int) -> None:
        """These rows go on with another stream of theirs."""
        for row in rows.tolist():
            self._generators[row] = generator(self._seeds[row], self._purpose, salt)

    def uniform(self, rows: Tensor, width: int) -> Tensor:
        """The next `width` numbers of each of these rows: float64 [rows, width] in [0, 1), on the rows' device."""
        drawn = [torch.rand(width, dtype=torch.float64, generator=self._generators[row]) for row in rows.tolist()]
        return torch.stack(drawn).to(rows.device)


class Streams:
    """All streams of a batch: for tokens, for the order, and for proposals that are only recorded."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self.tokens = RowStreams(seeds, TOKENS)
        self.order = RowStreams(seeds, ORDER)
        self.record = RowStreams(seeds, RECORD)

    def restart(self, rows: Tensor, salt: int) -> None:
        """These rows go on with other streams of theirs."""
        for streams in (self.tokens, self.order, self.record):
            streams.restart(rows, salt)


def sample_tokens(logits: Tensor, temperature: float, uniform: Tensor | None) -> Tensor:
    """A token for each position: the most likely one, or an exact draw from softmax(logits / temperature).

    The draw inverts the cumulative distribution in float64, so that it takes one uniform number for a position
    whatever the vocabulary; the distribution is that of the Gumbel rule of LLaDA, arXiv:2502.09992.

    Args:
        logits: float [N, V]; -inf forbids a token.
        temperature: 0 for the most likely token.
        uniform: float64 [N] in [0, 1); needed at a temperature above 0.

    Returns:
        int64 [N].

    Raises:
        ValueError: a temperature above 0 without uniform numbers.
    """
    if temperature == 0:
        return logits.argmax(-1)
    if uniform is None:
        raise ValueError(f"temperature={temperature} needs one uniform number for each position, got none")
    scaled = logits.double() / temperature
    cumulative = (scaled - scaled.amax(-1, keepdim=True)).exp_().cumsum(-1)
    total = cumulative[:, -1]
    # Rounding could lift the target to the total, past the last token that has any probability.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target[:, None], right=True).squeeze(-1)


def without_tokens(logits: Tensor, token_ids: tuple[int, ...]) -> Tensor:
    """A copy of the logits [N, V] in which these tokens are impossible; the logits themselves where there are none."""
    if not token_ids:
        return logits
    return logits.index_fill(-1, torch.tensor(token_ids, device=logits.device), -torch.inf)


def chosen_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """log softmax(logits) at the tokens: float [N, V], int64 [N] -> float [N], in the dtype of the logits."""
    return logits.gather(-1, tokens[:, None]).squeeze(-1) - logits.logsumexp(-1)


class Score(Protocol):
    """How early a proposed token should be committed."""

    @property
    def random(self) -> bool:
        """Whether `uniform` is needed."""
        ...

    def score(self, logits: Tensor, tokens: Tensor, uniform: Tensor | None) -> Tensor:
        """float [N], higher is earlier.

        Args:
            logits: float [N, V], clean: no noise, no temperature; at least float32.
            tokens: int64 [N], the proposals.
            uniform: float64 [N] in [0, 1), where the score is random.
        """
        ...


@dataclass(frozen=True)
class Confidence:
    """The probability of the proposed token (`low_confidence` remasking)."""

    random: bool = False

    def score(self, logits: Tensor, tokens: Tensor, uniform: Tensor | None) -> Tensor:
        """See `Score.score`; in [0, 1]."""
        return chosen_log_probs(logits, tokens).exp()


@dataclass(frozen=True)
class RandomOrder:
    """A uniform draw (`random` remasking)."""

    random: bool = True

    def score(self, logits: Tensor, tokens: Tensor, uniform: Tensor | None) -> Tensor:
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

    def score(self, logits: Tensor, tokens: Tensor, uniform: Tensor | None) -> Tensor:
        """See `Score.score`; -1 for end tokens, below every probability, also one that underflows to 0."""
        ends = torch.isin(tokens, tokens.new_tensor(self.stop_token_ids))
        score = self.inner.score(without_tokens(logits, self.stop_token_ids), tokens, uniform)
        return score.masked_fill(ends, -1.0)
