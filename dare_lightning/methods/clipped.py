"""What methods with a clipped ratio for each token share; they differ in their rows and their estimator."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dare_lightning.diffusion.losses import Aggregation, ClippedObjective, ClipRange
from dare_lightning.diffusion.rows import Rows
from dare_lightning.methods.base import LossOutput
from dare_lightning.methods.group_relative import GroupRelativeMethod
from dare_lightning.replay.batch import SequenceBatch


class ClippedTokenMethod(GroupRelativeMethod):
    """PPO's clipped surrogate on an estimate of each token's log-prob, with a group-relative advantage.

    Args:
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: bound of the loss of tokens with negative advantage, above 1; None for no bound.
        aggregation: how token losses are averaged.
        group: as in `GroupRelativeMethod`.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        *args: Any,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        aggregation: Aggregation = "token_mean",
        **group: Any,
    ) -> None:
        super().__init__(*args, **group)
        self.objective = ClippedObjective(ClipRange(clip_low, clip_high, dual_clip), aggregation, self.kl_coef)

    def policy_loss(
        self, log_likelihood: Tensor, old: Tensor, ref: Tensor | None, rows: Rows, batch: SequenceBatch
    ) -> LossOutput:
        """Token-level clipped surrogate, plus kl_coef times k3."""
        assert batch.advantage is not None  # the rollout fills it
        total, metrics = self.objective.total(log_likelihood, old, ref, batch.advantage, self.learned(batch))
        return LossOutput(total, metrics)

    def denominator(self, rows: Rows, batch: SequenceBatch) -> Tensor:
        """The tokens or sequences of this micro-batch, float64 [1]."""
        return self.objective.denominator(self.counted(batch), batch.response_mask.sum(-1))
