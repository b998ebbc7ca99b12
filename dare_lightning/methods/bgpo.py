"""BGPO: many Monte Carlo rows at the memory of one, through a bound that is a sum over rows."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from dare_lightning.diffusion.bounds import boundary_ratio, boundary_surrogate
from dare_lightning.diffusion.diagnostics import ratio_metrics
from dare_lightning.diffusion.likelihood import row_sums
from dare_lightning.diffusion.losses import Aggregation, kl_estimate
from dare_lightning.diffusion.rows import Rows
from dare_lightning.methods.base import LossOutput
from dare_lightning.methods.elbo_rows import ElboRows, LevelScope
from dare_lightning.methods.sequence import ClippedSequenceMethod, divisors
from dare_lightning.replay.batch import SequenceBatch


class BGPO(ClippedSequenceMethod):
    """Clip a bound of the importance ratio row by row, so that each row can be differentiated alone.

    Args:
        samples: Monte Carlo rows a completion.
        level_scope: as in `ElboRows`.
        advantage: reward minus the group's mean, divided by its deviation.
        aggregation: completions weigh by their length.
        clipped: as in `ClippedSequenceMethod`.

    Raises:
        ValueError: a setting is out of range.

    Source: Lin et al. 2025, arXiv:2510.11683.
    """

    additive_rows: ClassVar[bool] = True

    def __init__(
        self,
        *args: Any,
        samples: int = 16,
        level_scope: LevelScope = "sequence",
        advantage: str = "grpo",
        aggregation: Aggregation = "token_mean",
        **clipped: Any,
    ) -> None:
        super().__init__(*args, advantage=advantage, aggregation=aggregation, **clipped)
        self.noise = ElboRows(samples, level_scope)
        self.noise.check(self.policy)

    def corrupt(self, batch: SequenceBatch) -> Rows:
        """`samples` rows at evenly spread levels."""
        return self.noise.draw(self.policy, batch, self.counted(batch))

    def log_likelihood(self, row_log_probs: Tensor, rows: Rows, batch: SequenceBatch) -> Tensor:
        """The ELBO of each row in nats, float [B, N]."""
        return row_sums(row_log_probs, rows.weight)

    def policy_loss(
        self, log_likelihood: Tensor, old: Tensor, ref: Tensor | None, rows: Rows, batch: SequenceBatch
    ) -> LossOutput:
        """These rows' share of the clipped bound, and of kl_coef times the divergence of each row."""
        assert batch.advantage is not None  # the rollout fills it
        mask = self.counted(batch)
        exists = self.learned(batch).any(-1)[:, None].expand(log_likelihood.shape)
        divisor = divisors(mask, self.length_divisor).to(log_likelihood)[:, None]
        advantage = batch.advantage[:, None].to(log_likelihood)
        delta = (log_likelihood - old.detach()) / divisor
        surrogate = boundary_surrogate(delta, advantage, self.clip)
        loss, moved = surrogate.loss, delta.detach()
        metrics = ratio_metrics(
            boundary_ratio(moved, advantage),
            exists,
            surrogate.clipped,
            surrogate.dual_clipped,
            surrogate.clamped,
            kl_estimate("k3", moved, torch.zeros_like(moved)),
        )
        if ref is not None:
            divergence = torch.where(exists, kl_estimate(self.kl_kind, log_likelihood, ref.detach()) / divisor, 0.0)
            loss = loss + self.kl_coef * divergence
            metrics["kl"] = (divergence.detach().sum(), exists.sum().to(loss))
        return LossOutput(self.total(loss.sum(-1) / self.noise.samples, batch), metrics)
