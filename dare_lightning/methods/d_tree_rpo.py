"""d-TreeRPO: completions grow as a tree, and each segment of it is compared with its siblings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from dare_lightning.diffusion.losses import ClipRange, clipped_policy_loss
from dare_lightning.diffusion.rows import Rows
from dare_lightning.diffusion.trajectory import states_from_steps
from dare_lightning.diffusion.trees import (
    Segments,
    distillation_temperature,
    distillation_weight,
    divergence_from_target,
    node_values,
    segments,
    sibling_advantages,
    sibling_targets,
)
from dare_lightning.methods.base import DiffusionPolicyModule, LossOutput
from dare_lightning.methods.committed import written_steps
from dare_lightning.methods.defined import Undefined
from dare_lightning.replay.batch import SequenceBatch


class DTreeRPO(DiffusionPolicyModule):
    """Score what each segment wrote in one pass over its parent's state; the better siblings teach the policy as well.

    Args:
        denoising_steps: K, planned steps of a completion; nodes at depth d branch after d K / D of them.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: bound of the loss where the advantage is negative, above 1; None for no bound.
        distillation: lambda_max, the weight of the distillation at the end of the run; 0 switches it off.
        distillation_growth: gamma, how sharply the weight rises.
        target_temperature: tau_max, temperature of the siblings' weights at the start.
        target_decay: b, how it falls to the end of the run.
        total_steps: optimiser steps of the run that these follow; None takes the trainer's.
        count_after_eos: whether tokens after the first end token of a child count.
        base: as in `DiffusionPolicyModule`.

    Raises:
        ValueError: a setting is out of range.

    Source: arXiv:2512.09675.
    """

    needs: ClassVar[tuple[str, ...]] = ("tree", "commit_steps")
    additive_rows: ClassVar[bool] = True
    scores_once: ClassVar[bool] = True
    undefined: ClassVar[tuple[Undefined, ...]] = (
        Undefined(
            "block",
            "a node of the tree is a state in which any token may be hidden, and {family} reads a block only after"
            " finished ones, so that no sampler of its kind grows trees; use method=tracerl or dipo",
        ),
    )

    def __init__(
        self,
        *args: Any,
        denoising_steps: int,
        clip_low: float = 0.4,
        clip_high: float = 0.4,
        dual_clip: float | None = None,
        distillation: float = 3e-3,
        distillation_growth: float = 2.0,
        target_temperature: float = 2.0,
        target_decay: float = 0.7,
        total_steps: int | None = None,
        count_after_eos: bool = False,
        **base: Any,
    ) -> None:
        super().__init__(*args, **base)
        for name, value in (
            ("denoising_steps", denoising_steps),
            ("distillation_growth", distillation_growth),
            ("target_temperature", target_temperature),
            ("total_steps", 1 if total_steps is None else total_steps),
        ):
            if value <= 0:
                raise ValueError(f"method.{name}={value} must be above 0")
        if distillation < 0 or target_decay < 0:
            raise ValueError(
                f"method.distillation={distillation}, target_decay={target_decay}: both must be at least 0"
            )
        self.clip = ClipRange(clip_low, clip_high, dual_clip)
        self.denoising_steps, self.total_steps, self.count_after_eos = denoising_steps, total_steps, count_after_eos
        self.distillation, self.distillation_growth = distillation, distillation_growth
        self.target_temperature, self.target_decay = target_temperature, target_decay

    @property
    def progress(self) -> float:
        """The share of the run that is done, in [0, 1]."""
        if self.global_step == 0:
            return 0.0
        total = self.total_steps or self.trainer.estimated_stepping_batches
        return min(self.global_step / total, 1.0)

    def credit(self, batch: SequenceBatch) -> SequenceBatch:
        """An advantage for each segment of the whole trees, and a target from its better siblings.

        In `node_index` -1 then marks the segments that another leaf stands for.
        """
        assert batch.reward is not None  # the rollout fills all of these
        assert batch.group_index is not None
        assert batch.node_index is not None
        tree = segments(batch.node_index, batch.group_index)
        self._check_shared(batch, tree)
        advantage = sibling_advantages(node_values(batch.reward, tree), tree)
        found = {"step_advantage": advantage, "node_index": batch.node_index.masked_fill(~tree.stands, -1)}
        if self.distillation > 0:
            temperature = distillation_temperature(self.progress, self.target_temperature, self.target_decay)
            target = sibling_targets(advantage, batch.ids, self._active(batch), tree, temperature)
            found |= {"target_probs": target.probs, "target_weight": target.weight}
        return replace(batch, **found)  # type: ignore[arg-type]

    def _check_shared(self, batch: SequenceBatch, tree: Segments) -> None:
        """Refuse leaves that differ where one node stands for them, as they do when the steps are not the rollout's."""
        level = self._levels(batch)
        for depth, leader in enumerate(tree.leader.unbind(1)):
            written = torch.where((level >= 0) & (level <= depth), batch.ids, -1)
            if not torch.equal(written, written[leader]):
                raise ValueError(
                    "leaves of one node differ before it branches:"
                    f" method.denoising_steps={self.denoising_steps} is not that of the rollout (rollout.backend.steps)"
                )

    def _levels(self, batch: SequenceBatch) -> Tensor:
        """The segment that wrote each token, int64 [B, L], counted from the root; -1 where none did."""
        assert batch.node_index is not None  # the rollout fills it
        written = written_steps(batch)
        if int(written.max()) >= self.denoising_steps:
            raise ValueError(
                f"a token was written in step {int(written.max())}, method.denoising_steps={self.denoising_steps};"
                " set it to the steps of the rollout (rollout.backend.steps)"
            )
        return torch.where(written >= 0, written * batch.node_index.shape[1] // self.denoising_steps, -1)

    def _active(self, batch: SequenceBatch) -> Tensor:
        """The tokens that each segment wrote and that count, bool [B, D, L]."""
        assert batch.node_index is not None
        level = self._levels(batch)[:, None]
        depth = torch.arange(batch.node_index.shape[1], device=level.device)[:, None]
        active = (level == depth) & batch.response_mask[:, None]
        if self.count_after_eos:
            return active
        stops = torch.tensor(self.policy.stop_token_ids, device=level.device)
        # The first end token of the child: one that stands there when the segment ends.
        ends = (torch.isin(batch.ids, stops) & batch.response_mask)[:, None] & (level >= 0) & (level <= depth)
        return active & (ends.long().cumsum(-1) - ends.long() == 0)

    def corrupt(self, batch: SequenceBatch) -> Rows:
        """One row for each depth: the parent's state, scored where the segment wrote (once, for all its leaves)."""
        assert batch.node_index is not None
        assert batch.step_advantage is not None  # `credit` fills it
        depth = torch.arange(batch.node_index.shape[1], device=batch.ids.device)
        mask_id, at = self.policy.mask_token_id, depth.expand(len(batch), -1)
        rows = states_from_steps(batch.ids, batch.response_mask, self._levels(batch), batch.response_mask, mask_id, at)
        teaches = batch.node_index >= 0
        if not self.needs_reference:
            teaches = teaches & (batch.step_advantage != 0)
        return replace(rows, score_mask=self._active(batch) & teaches[..., None], index=depth)

    def log_likelihood(self, row_log_probs: Tensor, rows: Rows, batch: SequenceBatch) -> Tensor:
        """Log-prob of each token in its parent's state, float [B, N, L]."""
        return row_log_probs

    def policy_loss(
        self, log_likelihood: Tensor, old: Tensor, ref: Tensor | None, rows: Rows, batch: SequenceBatch
    ) -> LossOutput:
        """Mean over each segment's tokens of clipped surrogate plus kl_coef times k3, and the distillation."""
        assert batch.step_advantage is not None  # `credit` fills it
        assert rows.index is not None  # as does `corrupt`
        mask = rows.score_mask
        loss, metrics = clipped_policy_loss(
            log_likelihood.flatten(0, 1),
            old.flatten(0, 1),
            None if ref is None else ref.flatten(0, 1),
            batch.step_advantage[:, rows.index].flatten(),
            mask.flatten(0, 1),
            self.clip,
            self.kl_coef,
        )
        total = (loss.view_as(log_likelihood).sum(-1) / mask.sum(-1).clamp(min=1)).sum()
        if batch.target_probs is not None and batch.target_weight is not None and batch.node_index is not None:
            probs = torch.where(mask, batch.target_probs[:, rows.index], 0.0).to(log_likelihood)
            apart = divergence_from_target(probs, log_likelihood).sum(-1) * batch.target_weight[:, rows.index]
            factor = distillation_weight(self.progress, self.distillation, self.distillation_growth)
            total = total + factor * apart.sum()
            segments_here = (batch.node_index[:, rows.index] >= 0).sum()
            metrics["distillation"] = (apart.detach().sum(), segments_here.to(loss))
        return LossOutput(total.view(1), metrics)

    def denominator(self, rows: Rows, batch: SequenceBatch) -> Tensor:
        """The segments of this micro-batch, float64 [1]."""
        return self.count(batch)

    @torch.no_grad()
    def count(self, batch: SequenceBatch) -> Tensor:
        """`denominator`, which does not depend on the rows."""
        assert batch.node_index is not None
        return (batch.node_index >= 0).sum().double().view(1)
