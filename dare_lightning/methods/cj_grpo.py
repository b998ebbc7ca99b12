"""CJ-GRPO: every transition of the rollout is replayed, from the very state it started in."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dare_lightning.diffusion.rows import Rows
from dare_lightning.diffusion.shares import Shares, StepAggregation
from dare_lightning.diffusion.trajectory import Subset, dense_steps, draw_steps, states_from_steps
from dare_lightning.methods.committed import CommittedTokenMethod, written_steps
from dare_lightning.replay.batch import SequenceBatch


class CJGRPO(CommittedTokenMethod):
    """Score every token in the state from which the rollout wrote it, so that training sees what sampling saw.

    Args:
        max_train_steps: at most so many steps of each completion are trained on, a random choice in every inner epoch
            whose losses weigh accordingly more; None for all.
        advantage: the original subtracts the group's mean and does not divide by its deviation.
        aggregation: the original takes "step_mean"; DARE's block policies "transition_mean".
        committed: as in `CommittedTokenMethod`.

    Raises:
        ValueError: a setting is out of range.

    Source: arXiv:2509.23924, consistency-trajectory GRPO.
    """

    def __init__(
        self,
        *args: Any,
        max_train_steps: int | None = None,
        advantage: str = "no_std",
        aggregation: StepAggregation = "step_mean",
        **committed: Any,
    ) -> None:
        super().__init__(*args, advantage=advantage, aggregation=aggregation, **committed)
        if max_train_steps is not None and max_train_steps < 1:
            raise ValueError(f"method.max_train_steps={max_train_steps} must be at least 1, or null for all steps")
        self.max_train_steps = max_train_steps

    def steps(self, batch: SequenceBatch) -> Tensor:
        """The rollout's steps; those of a block policy are counted in each block."""
        written, blocks = written_steps(batch), batch.block_ids(self.policy.block_length)
        return written if blocks is None else dense_steps(written, blocks)

    def corrupt(self, batch: SequenceBatch) -> Rows:
        """One row for each step, or for each of a random choice."""
        drawn = self._drawn(batch)
        if drawn is None:
            return super().corrupt(batch)
        return states_from_steps(
            batch.ids, batch.response_mask, self.steps(batch), self.counted(batch), self.policy.mask_token_id, drawn.at
        )

    def shares(self, batch: SequenceBatch) -> Shares:
        """The average over all steps; those that were drawn stand for the others."""
        shares = super().shares(batch)
        drawn = self._drawn(batch)
        if drawn is None:
            return shares
        return shares._replace(weight=shares.weight * drawn.scale[:, None])

    def _drawn(self, batch: SequenceBatch) -> Subset | None:
        if self.max_train_steps is None:
            return None
        salt = (batch.iteration,)
        return draw_steps(self.steps(batch), self.counted(batch), batch.noise_seed, salt, self.max_train_steps)
