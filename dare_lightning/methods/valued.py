"""Methods on the rollout's own steps whose advantages may come from a value model, trained beside the policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dare_lightning.diffusion.rows import Rows
from dare_lightning.diffusion.trajectory import dense_steps
from dare_lightning.diffusion.value import clipped_value_loss, outcome_rewards, step_returns
from dare_lightning.families.value import ValueModel
from dare_lightning.methods.base import LossOutput
from dare_lightning.methods.committed import MergedStepMethod
from dare_lightning.methods.plans import chunks, recomputed
from dare_lightning.methods.scoring import flat_rows
from dare_lightning.replay.batch import SequenceBatch


@dataclass(frozen=True)
class ValueSettings:
    """How a value model is used and trained.

    Attributes:
        learning_rate: of the value model; everything else of its optimiser is the policy's.
        gamma: discount of a step, in [0, 1].
        gae_lambda: decay of generalised advantage estimation, in [0, 1].
        clip: a value that moves further than this from what it was at the rollout gains nothing; None for no bound.

    Raises:
        ValueError: a setting is out of range.
    """

    learning_rate: float = 5e-6
    gamma: float = 1.0
    gae_lambda: float = 1.0
    clip: float | None = 0.2

    def __post_init__(self) -> None:
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"method.value_model.{name}={getattr(self, name)} is outside [0, 1]")
        if self.learning_rate <= 0:
            raise ValueError(f"method.value_model.learning_rate={self.learning_rate} must be above 0")
        if self.clip is not None and self.clip <= 0:
            raise ValueError(f"method.value_model.clip={self.clip} must be above 0, or null for no bound")


class ValuedStepMethod(MergedStepMethod):
    """A committed-token method in which a value model may judge every token when it was written.

    The reward of an answer, compared with its group, is paid at its last step. With a value model each token gets an
    advantage of its own, and answers without advantage teach as well: their tokens may be worth more or less than the
    value model says. Both networks are trained in the same optimiser steps; neither has a gradient from the other's
    loss, and gradients are clipped apart.

    Args:
        value_model: None for none; the advantage of an answer then serves all its tokens.
        merged: as in `MergedStepMethod`.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(self, *args: Any, value_model: ValueSettings | None = None, **merged: Any) -> None:
        super().__init__(*args, **merged)
        self.value_model = value_model
        self.value = None if value_model is None else ValueModel(self.policy)

    def trained_modules(self) -> list[nn.Module]:
        """The policy, and the value model where there is one."""
        return super().trained_modules() + ([] if self.value is None else [self.value])

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The policy's, and the value model's with its own learning rate."""
        groups = super().parameter_groups()
        if self.value is None or self.value_model is None:
            return groups
        trained = [p for p in self.value.parameters() if p.requires_grad]
        return [*groups, {"params": trained, "lr": self.value_model.learning_rate}]

    def teaches(self, batch: SequenceBatch) -> Tensor | None:
        """With a value model every answer does."""
        return super().teaches(batch) if self.value is None else None

    def train(self, mode: bool = True) -> Self:
        """Training mode, but for the value model as for the policy."""
        super().train(mode)
        if self.value is not None:
            self.value.eval()
        return self

    # Values.

    def row_values(self, rows: Rows, batch: SequenceBatch) -> Tensor:
        """The value of each scored position of every row, float [B, N, L]; 0 elsewhere."""
        assert self.value is not None
        with self.cost.spent_on("update" if torch.is_grad_enabled() else "old_policy"):
            values: Tensor = self.value(*flat_rows(self.policy, rows, batch, rows.score_mask))
        return values.view(rows.noisy_ids.shape)

    def token_values(self, rows: Rows, batch: SequenceBatch) -> Tensor:
        """The value of each token that these rows score, in the state from which it was written: float [B, L]."""
        again = self.gradient_plan == "replay" and torch.is_grad_enabled()
        score = recomputed(self.row_values) if again else self.row_values
        parts = [score(rows.select(part), batch).sum(1) for part in chunks(rows.count, self.rows_per_forward)]
        return torch.stack(parts).sum(0)

    def trace_steps(self, batch: SequenceBatch) -> Tensor:
        """The number of each counted token's step in the whole answer, int64 [B, L]; -1 where a token does not count.

        Blocks are written one after another, so that their steps follow each other.
        """
        steps, blocks = self.steps(batch), batch.block_ids(self.policy.block_length)
        if blocks is not None:
            steps = torch.where(steps >= 0, blocks * (steps.max() + 1) + steps, -1)
        return dense_steps(steps.masked_fill(~self.counted(batch), -1))

    def freeze_policies(self, batch: SequenceBatch, inner_epochs: int, keep_old: bool) -> SequenceBatch:
        """Also what the value model says now, and the advantages and targets that follow."""
        batch = super().freeze_policies(batch, inner_epochs, keep_old)
        if self.value is None or self.value_model is None:
            return batch
        assert batch.advantage is not None  # `credit` fills it
        with torch.no_grad():
            values = self.token_values(self.corrupt(batch), batch)
        steps = self.trace_steps(batch)
        rewards = outcome_rewards(batch.advantage.to(values), steps)
        found = step_returns(rewards, values, steps, self.value_model.gamma, self.value_model.gae_lambda)
        return replace(batch, token_advantage=found.advantage, old_values=values, value_target=found.target)

    def further_loss(self, rows: Rows, batch: SequenceBatch) -> LossOutput | None:
        """The value loss of the tokens that these rows score, averaged as the policy's loss is."""
        if self.value is None or self.value_model is None:
            return None
        assert batch.old_values is not None  # `freeze_policies` fills both
        assert batch.value_target is not None
        assert batch.denominator is not None  # the loader fills it
        scored, values = rows.score_mask.any(1), self.token_values(rows, batch)
        target = batch.value_target.to(values)
        loss = clipped_value_loss(values, batch.old_values.to(values), target, self.value_model.clip)
        loss = torch.where(scored, loss, 0.0)
        count = scored.sum().to(loss)
        error = torch.where(scored, (values - target).square(), 0.0)
        metrics = {
            "value_loss": (loss.detach().sum(), count),
            "value_error": (error.detach().sum(), count),
            "value_mean": (values.detach().sum(), count),
        }
        return LossOutput(self.shares(batch).total(loss, batch.denominator), metrics)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip each network's gradient by itself: the error of one must not shorten the other's step."""
        if self.value is None or not gradient_clip_val:
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        for module in self.trained_modules():
            if gradient_clip_algorithm == "value":
                nn.utils.clip_grad_value_(module.parameters(), gradient_clip_val)
            else:
                nn.utils.clip_grad_norm_(module.parameters(), gradient_clip_val)
