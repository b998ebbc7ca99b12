"""What methods with a clipped ratio for each token share; they differ in their rows and their estimator."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dare_lightning.diffusion.advantages import estimator
from dare_lightning.diffusion.losses import Aggregation, ClippedObjective, ClipRange
from dare_lightning.diffusion.rows import Rows
from dare_lightning.methods.base import DiffusionPolicyModule, LossOutput
from dare_lightning.replay.batch import SequenceBatch


class ClippedTokenMethod(DiffusionPolicyModule):
    """PPO's clipped surrogate on an estimate of each token's log-prob, with a group-relative advantage.

    Args:
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: bound of the loss of tokens with negative advantage, above 1; None for no bound.
        advantage: name of the group-relative estimator.
        count_after_eos: whether response tokens after the first end token count in the loss.
        aggregation: how token losses are averaged.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        *args: Any,
        advantage: str,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        count_after_eos: bool = False,
        aggregation: Aggregation = "token_mean",
        **base: Any,
    ) -> None:
        super().__init__(*args, **base)
        self.advantage = estimator(advantage)
        self.count_after_eos = count_after_eos
        self.objective = ClippedObjective(ClipRange(clip_low, clip_high, dual_clip), aggregation, self.kl_coef)

    def counted(self, batch: SequenceBatch) -> Tensor:
        """The tokens that count in the loss, bool [B, L]."""
        if not self.count_after_eos:
            return batch.completion_mask
        # What an early stop filled in was never sampled.
        return batch.response_mask if batch.commit_step is None else batch.response_mask & (batch.commit_step >= 0)

    def advantages(self, rewards: Tensor) -> Tensor:
        """[prompts, group] -> [prompts, group], by the configured estimator."""
        return self.advantage(rewards)

    def policy_loss(
        self, log_likelihood: Tensor, old: Tensor, ref: Tensor | None, rows: Rows, batch: SequenceBatch
    ) -> LossOutput:
        """Token-level clipped surrogate, plus kl_coef times k3."""
        assert batch.advantage is not None  # the rollout fills it
        total, metrics = self.objective.total(log_likelihood, old, ref, batch.advantage, self.counted(batch))
        return LossOutput(total, metrics)

    def denominator(self, rows: Rows, batch: SequenceBatch) -> Tensor:
        """The tokens or sequences of this micro-batch, float64 [1]."""
        return self.objective.denominator(self.counted(batch), batch.response_mask.sum(-1))
