"""Clipped surrogates, divergences and their aggregation.

Nothing here divides by a count of the batch: a loss is a sum over tokens or sequences together with what each
sequence adds to the denominator, so that the totals may span all micro-batches and ranks of an optimiser step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dare_lightning.diffusion.diagnostics import Metrics, ratio_metrics
from dare_lightning.diffusion.likelihood import masked_sum

MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0

KLKind = Literal["k1", "abs", "k2", "k3"]

Aggregation = Literal[
    "token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "dr_grpo", "sequence_sum_token_sum_norm"
]
AGGREGATIONS: tuple[str, ...] = (
    "token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_mean",
    "dr_grpo",
    "sequence_sum_token_sum_norm",
)


@dataclass(frozen=True)
class ClipRange:
    """The importance ratio is clipped to [1 - low, 1 + high].

    Attributes:
        low: in [0, 1).
        high: at least 0.
        dual: above 1; bounds the loss by -A dual where the advantage A is negative. None switches it off.

    Raises:
        ValueError: a bound outside its range.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.low < 1:
            raise ValueError(f"clip_low={self.low} is outside [0, 1); the ratio is kept above 1 - clip_low")
        if not 0 <= self.high < math.inf:
            raise ValueError(f"clip_high={self.high} must be a finite number of at least 0")
        if self.dual is not None and not 1 < self.dual < math.inf:
            raise ValueError(
                f"dual_clip={self.dual} must be a finite number above 1 (usually 3), or null to switch it off"
            )


class Surrogate(NamedTuple):
    """Attributes, all of one shape: the loss, and where it was clipped, dual-clipped, or its log-ratio clamped."""

    loss: Tensor
    clipped: Tensor
    dual_clipped: Tensor
    clamped: Tensor


def clipped_surrogate(log_ratio: Tensor, advantage: Tensor, clip: ClipRange) -> Surrogate:
    """PPO's max(-A r, -A clip(r)) with r = exp(log_ratio), optionally bounded by -A dual where A < 0.

    Evaluated in the log domain, so that the clipped side cannot overflow; equal to the usual form in value and
    gradient. The log-ratio is clamped to +-20 first.

    Args:
        log_ratio: float, any shape; log p - log p_old at the level of the method.
        advantage: float, broadcastable to it; carries no gradient.
        clip: the range.

    Source: arXiv:1707.06347 equation 7; dual clip arXiv:1912.09729 equation 5.
    """
    advantage = advantage.detach().expand_as(log_ratio)
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    up, down = math.log1p(clip.high), math.log1p(-clip.low)
    positive = advantage >= 0
    loss = -advantage * torch.where(positive, bounded.clamp(max=up), bounded.clamp(min=down)).exp()
    clipped = torch.where(positive, bounded > up, bounded < down) & (advantage != 0)
    dual_clipped = torch.zeros_like(clipped)
    if clip.dual is not None:
        ceiling = -advantage * clip.dual
        dual_clipped = ~positive & (loss > ceiling)
        loss = torch.where(dual_clipped, ceiling, loss)
    return Surrogate(loss, clipped, dual_clipped, log_ratio.abs() > MAX_LOG_RATIO)


def kl_estimate(kind: KLKind, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """An estimate of KL(policy, reference) from samples of the policy, elementwise; d = log_probs - ref_log_probs.

    k1 = d, abs = |d|, k2 = d^2 / 2, k3 = exp(-d) + d - 1 with -d clamped at 20 and the result at 10.

    Raises:
        ValueError: no such estimator.

    Source: Schulman 2020, "Approximating KL divergence"; the clamps are verl's.
    """
    d = log_probs - ref_log_probs
    if kind == "k1":
        return d
    if kind == "abs":
        return d.abs()
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        negative = (-d).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return (negative.exp() - negative - 1).clamp(-MAX_K3, MAX_K3)
    raise ValueError(f"KL estimator {kind!r} does not exist; choose k1, abs, k2 or k3")


def contributions(loss: Tensor, mask: Tensor, mode: Aggregation, canvas: Tensor | None = None) -> Tensor:
    """What each sequence adds to the summed loss: [B, L] with bool mask [B, L] -> [B]; see `denominators`."""
    total = masked_sum(loss, mask)
    if mode == "sequence_mean_token_mean":
        return total / mask.sum(-1).clamp(min=1)
    if mode == "sequence_sum_token_sum_norm":
        return total / _canvas(mode, canvas)
    return total


def denominators(mask: Tensor, mode: Aggregation, canvas: Tensor | None = None) -> Tensor:
    """What each sequence adds to the number that the summed loss is divided by, float64 [B].

    Args:
        mask: bool [B, L], the tokens that count.
        mode: "token_mean" the tokens of the step; "sequence_mean_token_sum" and "sequence_mean_token_mean" its
            sequences; "dr_grpo" its canvas tokens B R, whether they count or not; "sequence_sum_token_sum_norm"
            (verl's seq-mean-token-sum-norm) divides by R alone, so it is a sum over sequences: the shares here add up
            to 1 over this call, which is only right where one call covers the whole optimiser step.
        canvas: int64 [B], R: tokens each response had room for; needed by the last two.

    Raises:
        ValueError: unknown mode, or a canvas is needed.

    Source: verl; Dr.GRPO, arXiv:2503.20783.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"aggregation {mode!r} does not exist; choose one of {', '.join(AGGREGATIONS)}")
    if mode == "token_mean":
        return mask.sum(-1).double()
    if mode == "dr_grpo":
        return _canvas(mode, canvas).double()
    sequences = torch.ones(len(mask), dtype=torch.float64, device=mask.device)
    return sequences / len(mask) if mode == "sequence_sum_token_sum_norm" else sequences


def check_aggregation(mode: str) -> None:
    """Raise ValueError where this is no aggregation whose denominators add up over micro-batches."""
    allowed = tuple(known for known in AGGREGATIONS if known != "sequence_sum_token_sum_norm")
    if mode not in allowed:
        raise ValueError(f"aggregation={mode!r}; choose one of {', '.join(allowed)}")


def aggregate(loss: Tensor, mask: Tensor, mode: Aggregation, canvas: Tensor | None = None) -> Tensor:
    """The loss of a batch that is a whole optimiser step: sum of `contributions` over sum of `denominators`."""
    total = denominators(mask, mode, canvas).sum()
    return contributions(loss, mask, mode, canvas).sum() / total.clamp_min(torch.finfo(total.dtype).tiny)


def clipped_policy_loss(
    log_likelihood: Tensor,
    old: Tensor,
    ref: Tensor | None,
    advantage: Tensor,
    mask: Tensor,
    clip: ClipRange,
    kl_coef: float = 0.0,
    kl_kind: KLKind = "k3",
) -> tuple[Tensor, Metrics]:
    """The clipped surrogate plus kl_coef times a divergence from the reference, token by token or row by row.

    Args:
        log_likelihood, old, ref: float [B, ...]; ref may be None where kl_coef is 0.
        advantage: float [B], or one for each token in the shape of `log_likelihood`.
        mask: bool [B, ...], what counts; the loss is 0 elsewhere.

    Returns:
        The loss, shaped like `log_likelihood`, and sums for the metrics of `ratio_metrics` and kl.
    """
    log_ratio = torch.where(mask, log_likelihood - old.detach(), 0.0)
    spread = advantage.view(*advantage.shape, *[1] * (log_likelihood.ndim - advantage.ndim)).to(log_likelihood)
    surrogate = clipped_surrogate(log_ratio, spread, clip)
    loss = torch.where(mask, surrogate.loss, 0.0)
    ratio = log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    old_kl = kl_estimate("k3", log_ratio.detach(), torch.zeros_like(log_ratio))
    metrics = ratio_metrics(ratio, mask, surrogate.clipped, surrogate.dual_clipped, surrogate.clamped, old_kl)
    if ref is not None:
        divergence = torch.where(mask, kl_estimate(kl_kind, log_likelihood, ref.detach()), 0.0)
        loss = loss + kl_coef * divergence
        metrics["kl"] = (divergence.detach().sum(), mask.sum().to(loss))
    return loss, metrics


@dataclass(frozen=True)
class ClippedObjective:
    """The token-level objective of the GRPO family: clipped surrogate plus a divergence, aggregated over a step.

    Attributes:
        clip: range of the importance ratio.
        aggregation: how token losses are averaged; one whose denominators add up over micro-batches.
        kl_coef: weight of the divergence from the reference.
        kl_kind: "k2" or "k3"; the gradient of k1 is zero in expectation, so it is no loss.

    Raises:
        ValueError: an aggregation or estimator that does not exist or cannot be used here.
    """

    clip: ClipRange
    aggregation: Aggregation = "token_mean"
    kl_coef: float = 0.0
    kl_kind: KLKind = "k3"

    def __post_init__(self) -> None:
        check_aggregation(self.aggregation)
        if self.kl_kind not in ("k2", "k3"):
            raise ValueError(f"kl_kind={self.kl_kind!r} cannot serve as a loss; choose k2 or k3")

    def total(
        self, log_likelihood: Tensor, old: Tensor, ref: Tensor | None, advantage: Tensor, mask: Tensor
    ) -> tuple[Tensor, Metrics]:
        """The summed loss [1] and sums for the metrics; arguments as `clipped_policy_loss`, by token [B, L]."""
        loss, metrics = clipped_policy_loss(
            log_likelihood, old, ref, advantage, mask, self.clip, self.kl_coef, self.kl_kind
        )
        return contributions(loss, mask, self.aggregation).sum().view(1), metrics

    def denominator(self, mask: Tensor, canvas: Tensor) -> Tensor:
        """What these sequences add to the loss denominator, float64 [1]; arguments as `denominators`."""
        return denominators(mask, self.aggregation, canvas).sum().view(1)


def _canvas(mode: str, canvas: Tensor | None) -> Tensor:
    if canvas is None:
        raise ValueError(f"aggregation {mode} divides by the response's room in tokens; pass canvas")
    return canvas.clamp(min=1)
