"""DiPO: the policy gradient of a block-diffusion rollout, averaged over the tokens of each group."""

from __future__ import annotations

from typing import Any

from dare_lightning.diffusion.shares import StepAggregation
from dare_lightning.methods.committed import MergedStepMethod


class DiPO(MergedStepMethod):
    """Score every token in the state from which it was written, all blocks at once; average within each group.

    Args:
        advantage: the paper subtracts the group's mean; its code also divides by the deviation ("z_score").
        aggregation: the original averages over the tokens of a group, then over groups.
        clip_low, clip_high: the original clips to [0.8, 1.28].
        committed: as in `MergedStepMethod`; the paper takes a shrink of 1.

    Raises:
        ValueError: a setting is out of range.

    Source: DiRL, arXiv:2512.22234.
    """

    def __init__(
        self,
        *args: Any,
        advantage: str = "no_std",
        aggregation: StepAggregation = "group_mean",
        clip_high: float = 0.28,
        **committed: Any,
    ) -> None:
        super().__init__(*args, advantage=advantage, aggregation=aggregation, clip_high=clip_high, **committed)
