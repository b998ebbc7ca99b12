"""What every method reports under the same names, so that methods compare.

All values are pairs (sum, weight); the reported value is their quotient over the whole optimiser step. `ratio_max` and
`effective_sample_size` are no sums: they are means over the parts of the step that were scored together.
"""

from __future__ import annotations

import torch
from torch import Tensor

Metrics = dict[str, tuple[Tensor, Tensor]]
"""name -> (sum, weight)."""


@torch.no_grad()
def ratio_metrics(
    ratio: Tensor, mask: Tensor, clipped: Tensor, dual_clipped: Tensor, clamped: Tensor, old_kl: Tensor
) -> Metrics:
    """How far the policy is from the one that wrote the rollout.

    Args:
        ratio: float, any shape; the importance ratio at the level of the method.
        mask: bool, what counts.
        clipped, dual_clipped, clamped: bool, where the loss was clipped, bounded, or its log-ratio clamped.
        old_kl: float, an estimate of the divergence from the old policy, elementwise.

    Returns:
        clip_fraction, dual_clip_fraction, ratio_mean, ratio_max, ratio_clamped_fraction, old_kl and
        effective_sample_size, which is (sum r)^2 / (n sum r^2): 1 where all ratios are equal.
    """
    count = mask.sum().to(ratio)
    kept = torch.where(mask, ratio, 0.0)
    sums = {
        "clip_fraction": clipped & mask,
        "dual_clip_fraction": dual_clipped & mask,
        "ratio_mean": kept,
        "ratio_clamped_fraction": clamped & mask,
        "old_kl": torch.where(mask, old_kl, 0.0),
    }
    metrics: Metrics = {name: (value.sum().to(ratio), count) for name, value in sums.items()}
    any_counts = mask.any().to(ratio)
    metrics["ratio_max"] = (kept.max() * any_counts, any_counts)
    squares = kept.square().sum().clamp_min(torch.finfo(ratio.dtype).tiny)
    metrics["effective_sample_size"] = (kept.sum().square() / squares, count)
    return metrics


@torch.no_grad()
def estimator_spread(draws: Tensor, length: Tensor) -> Metrics:
    """How much one Monte Carlo draw of a sequence's log-likelihood differs from another.

    Args:
        draws: float [B, N], the estimate of each draw in nats.
        length: int64 [B], tokens that count; sequences without any are left out.

    Returns:
        estimator_std: standard deviation over the draws, in nats a token, mean over sequences. Divided by sqrt(N) it is
        the standard error of the mean of independent draws. Nothing where there is a single draw.
    """
    if draws.shape[1] < 2:
        return {}
    counts = length > 0
    spread = draws.std(1) / length.clamp(min=1)
    return {"estimator_std": (torch.where(counts, spread, 0.0).sum(), counts.sum().to(spread))}
