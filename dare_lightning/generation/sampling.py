"""From the logits of one position to a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
        self._generators = [generator(seed, purpose) for seed in seeds]

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


@dataclass(frozen=True)
class TokenSampler:
    """How tokens are drawn: divide by the temperature, keep the nucleus, keep the most likely.

    Args:
        temperature: 0 takes the most likely token.
        top_p: keep the most likely tokens that together reach this probability, in (0, 1]; None keeps all.
        top_k: keep this many of the most likely tokens; None keeps all.

    Source: Dream's `sample_tokens`; the order of the three is its.
    """

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None

    @property
    def changes_logits(self) -> bool:
        """Whether tokens are drawn from anything else than softmax(logits)."""
        return self.temperature not in (0.0, 1.0) or self.top_p is not None or self.top_k is not None

    def distribution(self, logits: Tensor, mask_token_id: int) -> Tensor:
        """Logits of what tokens are drawn from, float [N, V].

        The mask token keeps its place, as published; the best other token is always kept, so that one can be drawn.
        """
        if not self.changes_logits:
            return logits
        scaled = logits / self.temperature if self.temperature > 0 else logits
        kept = scaled
        if self.top_p is not None:
            kept = _nucleus(kept, self.top_p)
        if self.top_k is not None and self.top_k < kept.shape[-1]:
            kept = kept.masked_fill(kept < kept.topk(self.top_k, dim=-1).values[:, -1:], -torch.inf)
        best = without_tokens(scaled, (mask_token_id,)).argmax(-1, keepdim=True)
        return kept.scatter(-1, best, scaled.gather(-1, best))

    def draw(self, distribution: Tensor, mask_token_id: int, uniform: Tensor | None) -> Tensor:
        """A token for each position, never the mask token: int64 [N]; see `sample_tokens` for `uniform`."""
        if self.temperature > 0:
            return sample_tokens(without_tokens(distribution, (mask_token_id,)), 1.0, uniform)
        tokens = sample_tokens(distribution, 0.0, None)
        # The mask token is seldom the most likely one, and a copy of all logits without it is dear.
        refused = (tokens == mask_token_id).nonzero().flatten()
        if len(refused) > 0:
            tokens[refused] = sample_tokens(without_tokens(distribution[refused], (mask_token_id,)), 0.0, None)
        return tokens


def _nucleus(logits: Tensor, share: float) -> Tensor:
    """The logits without the tokens after the one with which the most likely ones reach this share."""
    ordered, order = logits.sort(dim=-1, descending=True)
    before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
    before[:, 0] = 0.0
    return logits.masked_fill(torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before > share), -torch.inf)


def without_tokens(logits: Tensor, token_ids: tuple[int, ...]) -> Tensor:
    """A copy of the logits [N, V] in which these tokens are impossible; the logits themselves where there are none."""
    if not token_ids:
        return logits
    return logits.index_fill(-1, torch.tensor(token_ids, device=logits.device), -torch.inf)


def chosen_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """log softmax(logits) at the tokens: float [N, V], int64 [N] -> float [N], in the dtype of the logits."""
    # Not through logsumexp: its exponentials are several times slower on the CPU where tokens are all but impossible.
    return logits.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
