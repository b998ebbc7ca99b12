"""JustGRPO: the exact likelihood of a rollout that was written from left to right."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from dare_lightning.diffusion.shares import StepAggregation
from dare_lightning.diffusion.trajectory import left_to_right_steps
from dare_lightning.methods.committed import CommittedTokenMethod
from dare_lightning.replay.batch import SequenceBatch


class JustGRPO(CommittedTokenMethod):
    """Score each token with everything before it in sight and everything from it on hidden: plain GRPO.

    Args:
        advantage: the original divides by the group's deviation plus 1e-4.
        aggregation: the original divides the sum over tokens by the room of the responses that have an advantage.
        committed: as in `CommittedTokenMethod`.

    Raises:
        ValueError: a setting is out of range.

    Source: arXiv:2601.15165.
    """

    needs: ClassVar[tuple[str, ...]] = ("left_to_right",)

    def __init__(
        self,
        *args: Any,
        advantage: str = "grpo_1e4",
        aggregation: StepAggregation = "taught_dr_grpo",
        **committed: Any,
    ) -> None:
        super().__init__(*args, advantage=advantage, aggregation=aggregation, **committed)

    def steps(self, batch: SequenceBatch) -> Tensor:
        """One step for each token, from the left; those of a block policy are counted in each block."""
        return left_to_right_steps(batch.response_mask, batch.block_ids(self.policy.block_length))
