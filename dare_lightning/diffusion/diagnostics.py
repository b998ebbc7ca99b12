"""What every method reports under the same names, so that methods compare.

All values are pairs (sum, weight); the reported value is their quotient over the whole optimiser step. `ratio_max` is
no sum: it is the mean over the parts of the step that were scored together. Samples that teach nothing are not run,
and are left out.
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
        clip_fraction, dual_clip_fraction, ratio_mean, ratio_square_mean, ratio_max, ratio_clamped_fraction, old_kl.
    """
    count = mask.sum().to(ratio)
    kept = torch.where(mask, ratio, 0.0)
    sums = {
        "clip_fraction": clipped & mask,
        "dual_clip_fraction": dual_clipped & mask,
        "ratio_mean": kept,
        "ratio_square_mean": kept.square(),
        "ratio_clamped_fraction": clamped & mask,
        "old_kl": torch.where(mask, old_kl, 0.0),
    }
    metrics: Metrics = {name: (value.sum().to(ratio), count) for name, value in sums.items()}
    any_counts = mask.any().to(ratio)
    metrics["ratio_max"] = (kept.max() * any_counts, any_counts)
    return metrics


def derived(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """What follows from the reported values of a whole optimiser step, and not from its parts.

    Returns:
        effective_sample_size, (sum r)^2 / (n sum r^2) of the importance ratios: 1 where all are equal. Nothing for a
        method without ratios.
    """
    if "ratio_square_mean" not in values:
        return {}
    squares = values["ratio_square_mean"].clamp_min(torch.finfo(torch.float64).tiny)
    return {"effective_sample_size": values["ratio_mean"].square() / squares}


class EntropySum:
    """The entropy of the distributions that tokens were scored under, summed piece by piece where the logits are."""

    def __init__(self) -> None:
        self._pair: tuple[Tensor, Tensor] | None = None
        self._open = True

    @torch.no_grad()
    def add(self, logits: Tensor, log_normalizer: Tensor) -> None:
        """Add the distributions softmax(logits).

        Args:
            logits: float [N, V], finite.
            log_normalizer: float [N], their logsumexp.
        """
        if not self._open:
            return
        probs = (logits - log_normalizer[:, None]).exp_()
        # H = log Z - E[logit]; as one product, because the sum of another [N, V] tensor would cost more than all else.
        entropy = (log_normalizer - torch.einsum("nv,nv->n", probs, logits)).sum()
        count = torch.full_like(entropy, len(logits))
        self._pair = (entropy, count) if self._pair is None else (self._pair[0] + entropy, self._pair[1] + count)

    def metrics(self) -> Metrics:
        """entropy, nats of a scored position. What comes later, when the backward pass scores again, is not added."""
        self._open = False
        return {} if self._pair is None else {"entropy": self._pair}


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
