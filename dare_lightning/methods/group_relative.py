"""What methods on rollouts share: advantages within a group, and which tokens count."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dare_lightning.diffusion.advantages import estimator
from dare_lightning.methods.base import DiffusionPolicyModule
from dare_lightning.replay.batch import SequenceBatch


class GroupRelativeMethod(DiffusionPolicyModule):
    """A completion is compared with the others that answer the same prompt.

    Args:
        advantage: name of the group-relative estimator.
        count_after_eos: whether response tokens after the first end token count in the loss.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(self, *args: Any, advantage: str, count_after_eos: bool = False, **base: Any) -> None:
        super().__init__(*args, **base)
        self.advantage = estimator(advantage)
        self.count_after_eos = count_after_eos

    def counted(self, batch: SequenceBatch) -> Tensor:
        """The tokens that count in the loss, bool [B, L]."""
        if not self.count_after_eos:
            return batch.completion_mask
        # What an early stop filled in was never sampled.
        return batch.response_mask if batch.commit_step is None else batch.response_mask & (batch.commit_step >= 0)

    def advantages(self, rewards: Tensor) -> Tensor:
        """[prompts, group] -> [prompts, group], by the configured estimator."""
        return self.advantage(rewards)
