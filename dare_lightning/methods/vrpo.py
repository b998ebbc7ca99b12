"""VRPO: direct preference optimisation on Monte Carlo ELBOs of low variance."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from dare_lightning.diffusion.likelihood import row_sums
from dare_lightning.diffusion.preference import dpo_loss, find_pairs, margins
from dare_lightning.diffusion.rows import Rows
from dare_lightning.methods.base import DiffusionPolicyModule, LossOutput
from dare_lightning.methods.elbo_rows import ElboRows, LevelScope
from dare_lightning.methods.sequence import checked_divisor, divisors
from dare_lightning.replay.batch import SequenceBatch


class VRPO(DiffusionPolicyModule):
    """Prefer one answer to another by the difference of their ELBOs, each relative to a reference.

    Policy and reference read the same masks; the two answers of a pair draw their own. In a batch, two rows with the
    same `group_index` are a pair, and the one with the larger `reward` is preferred.

    Args:
        beta: scale of the implicit reward.
        samples: noisy rows of each answer, one mask a level.
        level_scope: as in `ElboRows`.
        length_divisor: ELBOs are divided by it; 1 is the method, None takes each answer's own length.
        sft_coef: weight of the preferred answer's negative ELBO per token, added to the loss.
        base: as in `DiffusionPolicyModule`.

    Raises:
        ValueError: a setting is out of range.

    Source: Zhu et al. 2025 (LLaDA 1.5), arXiv:2505.19223.
    """

    online: ClassVar[bool] = False
    compares_pairs: ClassVar[bool] = True

    def __init__(
        self,
        *args: Any,
        beta: float = 0.2,
        samples: int = 8,
        level_scope: LevelScope = "sequence",
        length_divisor: float | None = 1.0,
        sft_coef: float = 0.0,
        **base: Any,
    ) -> None:
        super().__init__(*args, **base)
        if self.kl_coef > 0:
            raise ValueError(
                f"method.kl_coef={self.kl_coef}: method.beta sets VRPO's divergence from the reference; leave it at 0"
            )
        if beta <= 0 or sft_coef < 0:
            raise ValueError(f"method.beta={beta} must be above 0 and method.sft_coef={sft_coef} at least 0")
        self.beta = beta
        self.noise = ElboRows(samples, level_scope)
        self.noise.check(self.policy)
        self.length_divisor = checked_divisor(length_divisor)
        self.sft_coef = sft_coef

    @property
    def needs_reference(self) -> bool:
        """Always: the implicit reward is a ratio to it."""
        return True

    def train(self, mode: bool = True) -> Self:
        """Training mode, but for the policy: dropout would make it differ from the reference before any update."""
        super().train(mode)
        self.policy.eval()
        return self

    def corrupt(self, batch: SequenceBatch) -> Rows:
        """`samples` rows of each answer at evenly spread levels."""
        return self.noise.draw(self.policy, batch, batch.completion_mask)

    def log_likelihood(self, row_log_probs: Tensor, rows: Rows, batch: SequenceBatch) -> Tensor:
        """The ELBO of each row in nats, float [B, N]."""
        return row_sums(row_log_probs, rows.weight)

    def draws(self, row_log_probs: Tensor, rows: Rows, batch: SequenceBatch) -> Tensor:
        """The ELBO of each row in nats, float [B, n]."""
        return self.log_likelihood(row_log_probs, rows, batch)

    def advantages(self, rewards: Tensor) -> Tensor:
        """Preference data have no rewards."""
        raise ValueError("VRPO learns from pairs of given answers and uses no advantages; choose a method on rollouts")

    def policy_loss(
        self, log_likelihood: Tensor, old: Tensor, ref: Tensor | None, rows: Rows, batch: SequenceBatch
    ) -> LossOutput:
        """-log sigmoid(beta times the difference of the two answers' gains over the reference), summed over pairs."""
        if ref is None:
            raise ValueError("VRPO compares with a reference and has none: call keep_reference() before training")
        pairs = find_pairs(batch.group_index, batch.reward)
        mask = batch.completion_mask
        divisor = divisors(mask, self.length_divisor).to(log_likelihood)[:, None]
        margin = margins(log_likelihood / divisor, ref / divisor, pairs)
        loss = dpo_loss(margin, self.beta)
        length = mask.sum(-1)
        if self.sft_coef:
            likelihood = log_likelihood.mean(-1) / length.clamp(min=1)
            loss = loss - self.sft_coef * likelihood[pairs.chosen]
        with torch.no_grad():
            gain = self.beta * ((log_likelihood - ref) / divisor).mean(-1)
            count = torch.tensor(len(loss), device=loss.device, dtype=loss.dtype)
            metrics = {
                "pair_accuracy": ((margin > 0).to(loss).sum(), count),
                "margin": (margin.sum(), count),
                "chosen_gain": (gain[pairs.chosen].sum(), count),
                "rejected_gain": (gain[pairs.rejected].sum(), count),
                "nelbo_per_token": (-log_likelihood.mean(-1).sum(), length.sum().to(loss)),
            }
        return LossOutput(loss.sum().view(1), metrics)

    def denominator(self, rows: Rows, batch: SequenceBatch) -> Tensor:
        """The pairs of this micro-batch, float64 [1]."""
        return torch.tensor([len(batch) / 2], dtype=torch.float64, device=batch.ids.device)
