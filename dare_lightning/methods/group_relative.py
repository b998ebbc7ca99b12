"""What methods on rollouts share: advantages within a group, and which tokens count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dare_lightning.diffusion.advantages import estimator, group_means
from dare_lightning.methods.base import DiffusionPolicyModule
from dare_lightning.replay.batch import SequenceBatch


class GroupRelativeMethod(DiffusionPolicyModule):
    """A completion is compared with the others that answer the same prompt.

    Args:
        advantage: name of the group-relative estimator.
        count_after_eos: whether response tokens after the first end token count in the loss.
        keep_accuracy: groups whose share of right answers lies outside [low, high] are left out of training: of the
            loss, of what it is divided by, and of any divergence; None keeps all.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        *args: Any,
        advantage: str,
        count_after_eos: bool = False,
        keep_accuracy: Sequence[float] | None = None,
        **base: Any,
    ) -> None:
        super().__init__(*args, **base)
        self.advantage = estimator(advantage)
        self.count_after_eos = count_after_eos
        bounds = None if keep_accuracy is None else tuple(float(bound) for bound in keep_accuracy)
        if bounds is not None and not (len(bounds) == 2 and 0 <= bounds[0] <= bounds[1] <= 1):
            raise ValueError(
                f"method.keep_accuracy={list(bounds)} must be two ordered numbers in [0, 1] (DiRL: [0.1, 0.9]), or null"
            )
        self.keep_accuracy = bounds

    def counted(self, batch: SequenceBatch) -> Tensor:
        """The tokens that count in the loss, bool [B, L]."""
        if not self.count_after_eos:
            return batch.completion_mask
        # What an early stop filled in was never sampled.
        return batch.response_mask if batch.commit_step is None else batch.response_mask & (batch.commit_step >= 0)

    def leaves_out(self, batch: SequenceBatch) -> Tensor | None:
        """The groups that are nearly always right or wrong, where `keep_accuracy` says so."""
        if self.keep_accuracy is None:
            return None
        assert batch.solved is not None  # the rollout fills both
        assert batch.group_index is not None
        accuracy = group_means(batch.solved, batch.group_index)
        low, high = self.keep_accuracy
        return (accuracy < low) | (accuracy > high)

    def learned(self, batch: SequenceBatch) -> Tensor:
        """The counted tokens of the samples that are run, bool [B, L]."""
        taught, counted = self.teaches(batch), self.counted(batch)
        return counted if taught is None else counted & taught[:, None]

    def advantages(self, rewards: Tensor) -> Tensor:
        """[prompts, group] -> [prompts, group], by the configured estimator."""
        return self.advantage(rewards)
