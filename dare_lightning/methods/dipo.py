"""DiPO: the policy gradient of a block-diffusion rollout, averaged over the tokens of each group."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dare_lightning.diffusion.shares import StepAggregation
from dare_lightning.diffusion.trajectory import collapse_steps, dense_steps
from dare_lightning.methods.committed import CommittedTokenMethod, written_steps
from dare_lightning.replay.batch import SequenceBatch


class DiPO(CommittedTokenMethod):
    """Score every token in the state from which it was written, all blocks at once; average within each group.

    Args:
        shrink: steps of a block that share a row; the paper takes 1.
        advantage: the paper subtracts the group's mean; its code also divides by the deviation ("z_score").
        aggregation: the original averages over the tokens of a group, then over groups.
        clip_low, clip_high: the original clips to [0.8, 1.28].
        committed: as in `CommittedTokenMethod`.

    Raises:
        ValueError: a setting is out of range.

    Source: DiRL, arXiv:2512.22234.
    """

    def __init__(
        self,
        *args: Any,
        shrink: int = 1,
        advantage: str = "no_std",
        aggregation: StepAggregation = "group_mean",
        clip_high: float = 0.28,
        **committed: Any,
    ) -> None:
        super().__init__(*args, advantage=advantage, aggregation=aggregation, clip_high=clip_high, **committed)
        if shrink < 1:
            raise ValueError(f"method.shrink={shrink} must be at least 1, which merges nothing")
        self.shrink = shrink

    def steps(self, batch: SequenceBatch) -> Tensor:
        """The rollout's steps, every `shrink` of a block (or of the response) merged into one."""
        blocks = batch.block_ids(self.policy.block_length)
        return collapse_steps(dense_steps(written_steps(batch), blocks), self.shrink)
