"""Bounds that make a sequence's likelihood trainable: of an importance ratio, and of the log-likelihood itself."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dare_lightning.diffusion.losses import ClipRange, Surrogate, clipped_surrogate

Sandwich = Literal["mix", "eubo", "elbo"]
SANDWICHES: tuple[str, ...] = ("mix", "eubo", "elbo")


def boundary_surrogate(delta: Tensor, advantage: Tensor, clip: ClipRange) -> Surrogate:
    """The clipped surrogate with a ratio that bounds A exp(mean delta) from below row by row.

    The ratio is 1 + delta where A > 0 and exp(delta) elsewhere, so the loss is a sum over Monte Carlo rows for either
    sign, and its gradient at delta = 0 is the same. The bounds of `clip` apply to every row. 1 + delta below the
    clip range stays, as a ratio there does in PPO.

    Args:
        delta: float, any shape; the row's log-likelihood minus the old policy's, divided by a length.
        advantage: float, broadcastable to it; carries no gradient.
        clip: the range.

    Source: BGPO, arXiv:2510.11683.
    """
    advantage = advantage.detach().expand_as(delta)
    exponential = clipped_surrogate(delta, advantage, clip)
    linear = -advantage * (1 + delta.clamp(max=clip.high))
    positive = advantage > 0
    return Surrogate(
        torch.where(positive, linear, exponential.loss),
        torch.where(positive, delta > clip.high, exponential.clipped),
        exponential.dual_clipped & ~positive,
        exponential.clamped & ~positive,
    )


def boundary_ratio(delta: Tensor, advantage: Tensor, limit: float = 20.0) -> Tensor:
    """The unclipped ratio of `boundary_surrogate`; the exponent is clamped to +-limit."""
    return torch.where(advantage > 0, 1 + delta, delta.clamp(-limit, limit).exp())


class SandwichBounds(NamedTuple):
    """Attributes: float [B] each, in nats a token; the lower bound and the upper one, up to constants."""

    lower: Tensor
    upper: Tensor


def sandwich_bounds(row_log_probs: Tensor, weight: Tensor, counted: Tensor, beta: float) -> SandwichBounds:
    """Evidence bounds of a completion, per token, from rows that each hide part of it.

    lower = mean over rows of the mean log-prob of the row's hidden tokens. upper = 1/beta times the mean over tokens of
    log q_i, q_i = mean over rows of p_i^beta w / (the share of the completion that the row hides). A token that no row
    hides is left out of the upper bound, a row that hides nothing of the lower one. With one row the two differ
    by a constant, and their gradients coincide.

    Args:
        row_log_probs: float [B, N, L].
        weight: float [B, N, L], 1 where a counted token is hidden and scored, else 0.
        counted: bool [B, L], the completion.
        beta: exponent of the upper bound, above 0.

    Source: SPG, arXiv:2510.09541; evaluated through logsumexp, so that p^beta cannot underflow.
    """
    weight = weight.to(row_log_probs)
    hidden = weight > 0
    count = weight.sum(-1)
    rows = (count > 0).sum(-1).clamp(min=1)
    lower = ((row_log_probs * weight).sum(-1) / count.clamp(min=1)).sum(-1) / rows
    share = count / counted.sum(-1).clamp(min=1)[:, None]
    terms = beta * row_log_probs - share.clamp_min(torch.finfo(share.dtype).tiny).log()[..., None]
    scored = hidden.any(1)
    # Tokens that no row hides get terms that exist, so that no gradient is undefined; they are left out below.
    terms = torch.where(scored[:, None], terms.masked_fill(~hidden, -torch.inf), 0.0)
    log_q = terms.logsumexp(1) - math.log(row_log_probs.shape[1])
    upper = torch.where(scored, log_q, 0.0).sum(-1) / scored.sum(-1).clamp(min=1) / beta
    return SandwichBounds(lower, upper)


def sandwiched(bounds: SandwichBounds, advantage: Tensor, kind: Sandwich, mix: float) -> Tensor:
    """What is raised or pushed down, float [B]: the lower bound where A > 0, elsewhere the one that `kind` says.

    Args:
        advantage: float [B].
        kind: "eubo" the upper bound, "elbo" the lower, "mix" mix x upper + (1 - mix) x lower.
    """
    share = {"mix": mix, "eubo": 1.0, "elbo": 0.0}[kind]
    pushed = share * bounds.upper + (1 - share) * bounds.lower
    return torch.where(advantage > 0, bounds.lower, pushed)
