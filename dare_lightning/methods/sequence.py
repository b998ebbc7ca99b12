"""What methods on a bound of a whole answer's log-likelihood share: how sequences are averaged, scaled and clipped."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dare_lightning.diffusion.losses import (
    Aggregation,
    ClipRange,
    KLKind,
    check_aggregation,
    clipped_policy_loss,
    contributions,
    denominators,
    kl_estimate,
)
from dare_lightning.diffusion.rows import Rows
from dare_lightning.methods.base import LossOutput
from dare_lightning.methods.group_relative import GroupRelativeMethod
from dare_lightning.replay.batch import SequenceBatch


class SequenceMethod(GroupRelativeMethod):
    """One loss for each completion.

    Args:
        aggregation: how the losses are averaged. Each is spread over its tokens, so "token_mean" weighs completions by
            length and "sequence_mean_token_mean" equally.
        group: as in `GroupRelativeMethod`.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(self, *args: Any, aggregation: Aggregation = "sequence_mean_token_mean", **group: Any) -> None:
        super().__init__(*args, **group)
        check_aggregation(aggregation)
        self.aggregation: Aggregation = aggregation

    def total(self, loss: Tensor, batch: SequenceBatch) -> Tensor:
        """The summed loss [1] of losses [B]; completions without a token that counts add nothing."""
        mask = self.counted(batch)
        spread = loss[:, None].expand(mask.shape)
        return contributions(spread, mask, self.aggregation, batch.response_mask.sum(-1)).sum().view(1)

    def denominator(self, rows: Rows, batch: SequenceBatch) -> Tensor:
        """The completions or tokens of this micro-batch, float64 [1]."""
        return denominators(self.counted(batch), self.aggregation, batch.response_mask.sum(-1)).sum().view(1)

    def draws(self, row_log_probs: Tensor, rows: Rows, batch: SequenceBatch) -> Tensor:
        """What `log_likelihood` says of each row (or pair), float [B, n]."""
        return self.log_likelihood(row_log_probs, rows, batch)


class ClippedSequenceMethod(SequenceMethod):
    """PPO's clipped surrogate with one ratio for each completion, from a Monte Carlo ELBO.

    `log_likelihood` returns the draws [B, N] of the ELBO in nats; their mean enters the ratio.

    Args:
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: bound of the loss of completions with negative advantage, above 1; None for no bound.
        length_divisor: the log-ratio and the divergence are divided by it; None takes each completion's own length, 1
            leaves them as they are.
        kl_kind: "k2" or "k3", the divergence from the reference, of ELBOs in nats.
        sequence: as in `SequenceMethod`.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        *args: Any,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        length_divisor: float | None = None,
        kl_kind: KLKind = "k2",
        **sequence: Any,
    ) -> None:
        super().__init__(*args, **sequence)
        if kl_kind not in ("k2", "k3"):
            raise ValueError(f"method.kl_kind={kl_kind!r} cannot serve as a loss; choose k2 or k3")
        self.clip = ClipRange(clip_low, clip_high, dual_clip)
        self.length_divisor = checked_divisor(length_divisor)
        self.kl_kind: KLKind = kl_kind

    def estimate(self, draws: Tensor) -> Tensor:
        """The ELBO [B] of draws [B, N]."""
        return draws.mean(-1)

    def policy_loss(
        self, log_likelihood: Tensor, old: Tensor, ref: Tensor | None, rows: Rows, batch: SequenceBatch
    ) -> LossOutput:
        """Clipped surrogate of each completion's ratio, plus kl_coef times the divergence, both by length."""
        assert batch.advantage is not None  # the rollout fills it
        mask = self.counted(batch)
        exists, divisor = self.learned(batch).any(-1), divisors(mask, self.length_divisor).to(log_likelihood)
        current, before = self.estimate(log_likelihood), self.estimate(old)
        loss, metrics = clipped_policy_loss(
            current / divisor, before / divisor, None, batch.advantage, exists, self.clip
        )
        if ref is not None:
            divergence = kl_estimate(self.kl_kind, current, self.estimate(ref.detach())) / divisor
            divergence = torch.where(exists, divergence, 0.0)
            loss = loss + self.kl_coef * divergence
            metrics["kl"] = (divergence.detach().sum(), exists.sum().to(loss))
        return LossOutput(self.total(loss, batch), metrics)


def checked_divisor(length_divisor: float | None) -> float | None:
    """A setting `length_divisor` that can divide.

    Raises:
        ValueError: it cannot.
    """
    if length_divisor is not None and not 0 < length_divisor < math.inf:
        raise ValueError(
            f"method.length_divisor={length_divisor} must be a finite number above 0: null divides by each answer's own"
            " length, 1 by nothing"
        )
    return length_divisor


def divisors(mask: Tensor, length_divisor: float | None) -> Tensor:
    """What log-likelihoods are divided by, float64 [B]: the number given, or the tokens that count, at least 1."""
    if length_divisor is None:
        return mask.sum(-1).clamp(min=1).double()
    return torch.full((len(mask),), float(length_divisor), dtype=torch.float64, device=mask.device)
