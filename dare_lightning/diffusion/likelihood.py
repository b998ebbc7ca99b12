"""From the log-probs of noisy rows to the likelihood of a sequence or of its tokens.

Every estimator is linear in the row log-probs, with the weights of the rows (`Rows.weight`).
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_sums(row_log_probs: Tensor, weight: Tensor) -> Tensor:
    """e(z_n) = sum_i w_i log p(x_i | z_n): [B, N, L] twice -> [B, N]."""
    return (row_log_probs * weight).sum(-1)


def elbo(row_log_probs: Tensor, weight: Tensor) -> Tensor:
    """The Monte Carlo ELBO in nats: mean over rows of the weighted sum of log-probs, [B, N, L] twice -> [B].

    With the weights 1/p of the t-form or L/l of the l-form its expectation is at most log p(x | prompt).

    Source: LLaDA, arXiv:2502.09992, likelihood evaluation.
    """
    return row_sums(row_log_probs, weight).mean(-1)


def inverse_level(level: Tensor) -> Tensor:
    """1/p, and 0 where p is 0 (a row in which nothing is hidden has nothing to weigh)."""
    return torch.where(level > 0, 1 / level.clamp(min=torch.finfo(level.dtype).tiny), 0.0)


def pair_elbo(row_log_probs: Tensor, complement_log_probs: Tensor, weight: Tensor, complement_weight: Tensor) -> Tensor:
    """1/2 [sum over M of lp/p + sum over the rest of lp'/(L/(L+1) - p)], mean over pairs: four [B, N, L] -> [B].

    Exactly unbiased for the ELBO although p = l/(L+1) is not l/L, because l = 0 is among the draws.

    Source: ESPO's sequence ELBO with reduced variance.
    """
    return (elbo(row_log_probs, weight) + elbo(complement_log_probs, complement_weight)) / 2


def coupled_token_log_probs(row_log_probs: Tensor, weight: Tensor) -> Tensor:
    """1/2 [lp(all hidden) + w lp(the one of M, complement that hides the token)]: [B, 3, L] twice -> [B, L].

    With the weights 1/q and 1/(1-q) of the original the expectation is 1.5 times a log-prob, so a "ratio" of two of
    these is not a probability ratio; with weights 1 it is a true average.

    Raises:
        ValueError: not three rows.

    Source: coupled sampling of DiffuCoder, arXiv:2506.20639.
    """
    if row_log_probs.shape[1] != 3:
        raise ValueError(f"coupled estimates need 3 rows (all, mask, complement), found {row_log_probs.shape[1]}")
    return (row_log_probs * weight).sum(1) / 2


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over the last axis of the values where the mask is True; what lies outside may be NaN."""
    return torch.where(mask, values, 0.0).sum(-1)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the last axis of the values where the mask is True; 0 where it is nowhere True."""
    return masked_sum(values, mask) / mask.sum(-1).clamp(min=1)
