"""MDPO: every denoising step is credited with what its proposals would have earned; the telling steps are trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from dare_lightning.diffusion.advantages import group_advantages
from dare_lightning.diffusion.losses import ClipRange, clipped_policy_loss, kl_estimate
from dare_lightning.diffusion.rows import Rows
from dare_lightning.diffusion.step_credit import held_rewards, step_scores, strongest_steps
from dare_lightning.methods.base import LossOutput
from dare_lightning.methods.group_relative import GroupRelativeMethod
from dare_lightning.parallel.collectives import gather_objects, sum_over_ranks
from dare_lightning.replay.batch import SequenceBatch


class MDPO(GroupRelativeMethod):
    """Train the denoising steps at which the answers of a group differ most, on all they proposed there.

    Args:
        train_steps: Kt, so many steps of a rollout are trained, the same for all its completions.
        mask_eps: added to the number of masks in a state, as the original does (1e-4); 0 divides by at least 1.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: bound of the loss where the advantage is negative, above 1; None for no bound.
        advantage: compares the scores of a step within the group.
        count_after_eos: whether proposals after the first end token that is proposed count; they do in the original.
        group: as in `GroupRelativeMethod`.

    Raises:
        ValueError: a setting is out of range.

    Source: arXiv:2508.13148.
    """

    needs: ClassVar[tuple[str, ...]] = ("states",)
    additive_rows: ClassVar[bool] = True
    scores_steps: ClassVar[bool] = True

    def __init__(
        self,
        *args: Any,
        train_steps: int = 16,
        mask_eps: float = 0.0,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        advantage: str = "grpo_1e4",
        count_after_eos: bool = True,
        **group: Any,
    ) -> None:
        super().__init__(*args, advantage=advantage, count_after_eos=count_after_eos, **group)
        if train_steps < 1:
            raise ValueError(f"method.train_steps={train_steps} must be at least 1; the authors' code takes 16")
        if mask_eps < 0:
            raise ValueError(f"method.mask_eps={mask_eps} must be at least 0")
        self.train_steps, self.mask_eps = train_steps, mask_eps
        self.clip = ClipRange(clip_low, clip_high, dual_clip)

    def credit(self, batch: SequenceBatch) -> SequenceBatch:
        """An advantage for each step, and of states and proposals those of the steps that are trained.

        The steps are chosen over the rollout of all ranks, every one of which must call this.
        """
        assert batch.step_rewards is not None  # the rollout fills all of these
        assert batch.group_index is not None
        assert batch.forward_passes is not None
        steps = max(gather_objects(int(batch.forward_passes.max())))
        scores = step_scores(held_rewards(batch.step_rewards, batch.forward_passes, steps))
        found = [group_advantages(score, batch.group_index, self.advantages).advantage for score in scores.unbind(1)]
        advantage = torch.stack(found, 1)
        made = torch.arange(steps, device=scores.device) < batch.forward_passes[:, None]
        counts = made if batch.left_out is None else made & ~batch.left_out[:, None]
        strength = sum_over_ranks((advantage.abs() * counts).sum(0).double(), self.device)
        return self._kept(batch, advantage, made, strongest_steps(strength, self.train_steps))

    def _kept(self, batch: SequenceBatch, advantage: Tensor, made: Tensor, chosen: Tensor) -> SequenceBatch:
        """The columns of the chosen steps; a completion that was finished by then read itself, without a mask."""
        assert batch.states is not None
        assert batch.proposals is not None
        assert batch.confidence is not None
        known, there = chosen.clamp(max=batch.states.shape[1] - 1), made[:, chosen, None]
        clean = batch.ids[:, None]
        return replace(
            batch,
            states=torch.where(there, batch.states[:, known], clean),
            proposals=torch.where(there, batch.proposals[:, known], clean),
            confidence=batch.confidence[:, known] * there,
            step_advantage=advantage[:, chosen],
            step_rewards=None,
        )

    def corrupt(self, batch: SequenceBatch) -> Rows:
        """One row for each trained step: the state it read, scored at every mask with what it proposed."""
        assert batch.states is not None  # `credit` keeps them
        assert batch.step_advantage is not None
        scored = self._masks(batch)
        if not self.needs_reference:
            scored = scored & (batch.step_advantage != 0)[..., None]  # such a step teaches nothing
        weight = torch.ones(1, 1, 1, device=scored.device).expand(scored.shape)
        index = torch.arange(scored.shape[1], device=scored.device)
        return Rows(batch.states, scored, weight, target_ids=batch.proposals, index=index)

    def _masks(self, batch: SequenceBatch) -> Tensor:
        """The masks of each state for which something was proposed and that count, bool [B, N, L]."""
        assert batch.states is not None
        assert batch.proposals is not None
        mask_id = self.policy.mask_token_id
        masks = (batch.states == mask_id) & (batch.proposals != mask_id) & batch.response_mask[:, None]
        if self.count_after_eos:
            return masks
        stops = torch.tensor(self.policy.stop_token_ids, device=masks.device)
        ends = (torch.isin(batch.proposals, stops) & batch.response_mask[:, None]).long()
        return masks & (ends.cumsum(-1) - ends == 0)

    def log_likelihood(self, row_log_probs: Tensor, rows: Rows, batch: SequenceBatch) -> Tensor:
        """Log-prob of each proposal in its row, float [B, N, L]."""
        return row_log_probs

    def policy_loss(
        self, log_likelihood: Tensor, old: Tensor, ref: Tensor | None, rows: Rows, batch: SequenceBatch
    ) -> LossOutput:
        """Clipped surrogate, weighed by how much of the answer was open, plus kl_coef times k2; both by confidence."""
        assert batch.step_advantage is not None  # `credit` fills it
        assert batch.confidence is not None
        assert batch.denominator is not None  # the loader fills it
        assert rows.index is not None  # `corrupt` does
        mask, advantage = rows.score_mask, batch.step_advantage[:, rows.index]
        loss, metrics = clipped_policy_loss(
            log_likelihood.flatten(0, 1),
            old.flatten(0, 1),
            None,
            advantage.flatten(),
            mask.flatten(0, 1),
            self.clip,
        )
        open_ = mask.sum(-1).to(loss)
        scale = batch.response_mask.sum(-1, keepdim=True) / (open_ + self.mask_eps if self.mask_eps else open_.clamp(1))
        loss = loss.view_as(log_likelihood) * scale[..., None]
        if ref is not None:
            divergence = torch.where(mask, kl_estimate("k2", log_likelihood, ref.detach()), 0.0)
            loss = loss + self.kl_coef * divergence
            metrics["kl"] = (divergence.detach().sum(), mask.sum().to(loss))
        weighed = (loss * batch.confidence[:, rows.index].to(loss)).sum((0, 2))
        total = loss.new_zeros(self.train_steps).index_add(0, rows.index, weighed)
        return LossOutput(total / (batch.denominator > 0).sum().clamp(min=1), metrics)

    def denominator(self, rows: Rows, batch: SequenceBatch) -> Tensor:
        """The masks of each trained step, float64 [Kt]; the loss is a mean over the steps that have any."""
        return self.count(batch)

    @torch.no_grad()
    def count(self, batch: SequenceBatch) -> Tensor:
        """`denominator`, which does not depend on the rows."""
        masks = self._masks(batch).sum((0, 2)).double()
        return torch.nn.functional.pad(masks, (0, self.train_steps - len(masks)))
