"""What methods on the rollout's own steps share: each token is scored once, in the state from which it was written."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from dare_lightning.diffusion.losses import ClipRange, clipped_policy_loss
from dare_lightning.diffusion.rows import Rows
from dare_lightning.diffusion.shares import Shares, StepAggregation, check_step_aggregation, step_shares
from dare_lightning.diffusion.trajectory import collapse_steps, dense_steps, states_from_steps
from dare_lightning.methods.base import LossOutput
from dare_lightning.methods.group_relative import GroupRelativeMethod
from dare_lightning.replay.batch import SequenceBatch


class CommittedTokenMethod(GroupRelativeMethod):
    """A clipped surrogate on the log-prob of each token in the state from which it was written.

    A method says which `steps` wrote the tokens, one row for each; all steps of a block policy's blocks that have the
    same local number share a row. The states are rebuilt from the tokens and their steps.

    Args:
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: bound of the loss of tokens with negative advantage, above 1; None for no bound.
        aggregation: how token losses are averaged, see `step_shares`.
        group: as in `GroupRelativeMethod`.

    Raises:
        ValueError: a setting is out of range.
    """

    needs: ClassVar[tuple[str, ...]] = ("commit_steps",)
    additive_rows: ClassVar[bool] = True
    scores_once: ClassVar[bool] = True

    def __init__(
        self,
        *args: Any,
        aggregation: StepAggregation,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        **group: Any,
    ) -> None:
        super().__init__(*args, **group)
        check_step_aggregation(aggregation)
        self.aggregation: StepAggregation = aggregation
        self.clip = ClipRange(clip_low, clip_high, dual_clip)

    def steps(self, batch: SequenceBatch) -> Tensor:
        """The row in which each response token is scored, int64 [B, L]; -1 for those that no step wrote."""
        raise NotImplementedError

    def shares(self, batch: SequenceBatch) -> Shares:
        """What each token weighs in the loss."""
        steps = self.steps(batch)
        return step_shares(
            self.aggregation,
            self.counted(batch) & (steps >= 0),
            steps,
            response_mask=batch.response_mask,
            block=batch.block_ids(self.policy.block_length),
            group=batch.group_index,
            taught=None if batch.advantage is None else (token_advantage(batch) != 0).view(len(batch), -1).any(1),
        )

    def corrupt(self, batch: SequenceBatch) -> Rows:
        """One row for each step: what it read, scored where it wrote."""
        return states_from_steps(
            batch.ids, batch.response_mask, self.steps(batch), self.counted(batch), self.policy.mask_token_id
        )

    def log_likelihood(self, row_log_probs: Tensor, rows: Rows, batch: SequenceBatch) -> Tensor:
        """Log-prob of each token when it was written, float [B, L]; 0 where these rows do not score it."""
        return row_log_probs.sum(1)

    def policy_loss(
        self, log_likelihood: Tensor, old: Tensor, ref: Tensor | None, rows: Rows, batch: SequenceBatch
    ) -> LossOutput:
        """Token-level clipped surrogate plus kl_coef times k3, of the tokens that these rows score."""
        assert batch.denominator is not None  # the loader fills it
        scored, advantage = rows.score_mask.any(1) & self.learned(batch), token_advantage(batch)
        loss, metrics = clipped_policy_loss(log_likelihood, old, ref, advantage, scored, self.clip, self.kl_coef)
        return LossOutput(self.shares(batch).total(loss, batch.denominator), metrics)

    def denominator(self, rows: Rows, batch: SequenceBatch) -> Tensor:
        """What this micro-batch adds to the denominators of the loss, float64 [D]."""
        return self.shares(batch).denominator

    @torch.no_grad()
    def count(self, batch: SequenceBatch) -> Tensor:
        """`denominator` without building the rows, which it does not depend on."""
        return self.shares(batch).denominator


class MergedStepMethod(CommittedTokenMethod):
    """A committed-token method in which consecutive steps may share a row.

    Args:
        shrink: s, steps of a block (or of the response) that share a row; 1 merges nothing.
        committed: as in `CommittedTokenMethod`.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(self, *args: Any, shrink: int = 1, **committed: Any) -> None:
        super().__init__(*args, **committed)
        if shrink < 1:
            raise ValueError(f"method.shrink={shrink} must be at least 1, which merges nothing")
        self.shrink = shrink

    def steps(self, batch: SequenceBatch) -> Tensor:
        """The rollout's steps, every `shrink` of a block (or of the response) merged into one."""
        blocks = batch.block_ids(self.policy.block_length)
        return collapse_steps(dense_steps(written_steps(batch), blocks), self.shrink)


def token_advantage(batch: SequenceBatch) -> Tensor:
    """The advantage of each token, float [B, L], where a value model has one for each; else that of the answer, [B]."""
    found = batch.advantage if batch.token_advantage is None else batch.token_advantage
    assert found is not None  # the rollout fills it
    return found


def written_steps(batch: SequenceBatch) -> Tensor:
    """The step that wrote each token, int64 [B, L].

    Raises:
        ValueError: the rollout did not say.
    """
    if batch.commit_step is None:
        raise ValueError(
            "the rollout does not say which step wrote each token (commit_step); use a backend that does"
            " (rollout=builtin)"
        )
    return batch.commit_step
