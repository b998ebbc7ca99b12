"""TraceRL: policy gradients along the trace of the rollout, several steps at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dare_lightning.diffusion.losses import clipped_policy_loss, kl_estimate
from dare_lightning.diffusion.rows import Rows
from dare_lightning.diffusion.shares import StepAggregation
from dare_lightning.methods.base import LossOutput
from dare_lightning.methods.committed import token_advantage
from dare_lightning.methods.valued import ValuedStepMethod
from dare_lightning.replay.batch import SequenceBatch


class TraceRL(ValuedStepMethod):
    """Score every token in the state before the group of `shrink` steps that wrote it.

    Args:
        tokens_after_end: so many response tokens after the first end token count as well.
        sum_kl: the divergence is summed over a row's tokens where the surrogate is averaged, as the original does for
            masked policies.
        aggregation: None takes the original's: "row_dr_grpo" under block policies, "row_mean" under masked ones.
        advantage: the original divides by the group's deviation, ddof 0.
        kl_coef: weight of the divergence from the policy that wrote the rollout; there is no reference.
        valued: as in `ValuedStepMethod`; the paper's code takes a shrink of 8 for LLaDA and 1 for SDAR.

    Raises:
        ValueError: a setting is out of range.

    Source: Wang et al. 2025, arXiv:2509.06949.
    """

    def __init__(
        self,
        *args: Any,
        tokens_after_end: int = 0,
        sum_kl: bool = False,
        aggregation: StepAggregation | None = None,
        advantage: str = "z_score",
        **valued: Any,
    ) -> None:
        super().__init__(*args, aggregation=aggregation or "row_mean", advantage=advantage, **valued)
        if tokens_after_end < 0:
            raise ValueError(f"method.tokens_after_end={tokens_after_end} must be at least 0")
        if aggregation is None and self.policy.block_length is not None:
            self.aggregation = "row_dr_grpo"
        self.tokens_after_end, self.sum_kl = tokens_after_end, sum_kl

    @property
    def needs_reference(self) -> bool:
        """The divergence is from the old policy."""
        return False

    def teaches(self, batch: SequenceBatch) -> Tensor | None:
        """A completion without advantage is still held to the old policy, where that is another one."""
        # Only the loader says what to divide by, so this is an update; without stored log-probs the old policy is the
        # policy itself, and the divergence has neither value nor gradient.
        same = batch.denominator is not None and batch.old_log_probs is None
        return super().teaches(batch) if self.kl_coef == 0 or same else None

    def counted(self, batch: SequenceBatch) -> Tensor:
        """Up to the first end token, and `tokens_after_end` more."""
        counted = super().counted(batch)
        if self.tokens_after_end == 0 or self.count_after_eos:
            return counted
        after = batch.response_mask & ~counted & (counted.flip(-1).cumsum(-1).flip(-1) == 0)
        return counted | (after & (after.cumsum(-1) <= self.tokens_after_end))

    def policy_loss(
        self, log_likelihood: Tensor, old: Tensor, ref: Tensor | None, rows: Rows, batch: SequenceBatch
    ) -> LossOutput:
        """Token-level clipped surrogate plus kl_coef times k3 against the old policy."""
        assert batch.denominator is not None  # the loader fills it
        if self.kl_coef == 0 or not self.sum_kl:
            return super().policy_loss(log_likelihood, old, old if self.kl_coef > 0 else None, rows, batch)
        scored, shares = rows.score_mask.any(1), self.shares(batch)
        loss, metrics = clipped_policy_loss(log_likelihood, old, None, token_advantage(batch), scored, self.clip)
        divergence = torch.where(scored, kl_estimate("k3", log_likelihood, old.detach()), 0.0)
        metrics["kl"] = (divergence.detach().sum(), scored.sum().to(loss))
        summed = shares._replace(weight=(shares.weight > 0).double())
        total = shares.total(loss, batch.denominator)
        return LossOutput(total + self.kl_coef * summed.total(divergence, batch.denominator), metrics)
