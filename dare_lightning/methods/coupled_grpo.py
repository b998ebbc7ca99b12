"""Coupled-GRPO: policy gradients with two complementary masks, so that every token is scored in a noisy context."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dare_lightning.diffusion.advantages import estimator
from dare_lightning.diffusion.corruption import Masks, coupled_masks, draw_times, noisy_rows
from dare_lightning.diffusion.likelihood import coupled_token_log_probs, inverse_level
from dare_lightning.diffusion.losses import Aggregation, ClippedObjective, ClipRange
from dare_lightning.diffusion.rows import Rows
from dare_lightning.methods.base import DiffusionPolicyModule, LossOutput
from dare_lightning.replay.batch import SequenceBatch


class CoupledGRPO(DiffusionPolicyModule):
    """Score every completion token twice: with everything hidden, and in the one of two complementary masks it is in.

    Args:
        mask_ratio: the ratio q of the first mask is uniform in this range, inside (0, 1).
        normalize_coupled_weights: weigh the two masks by 1 instead of 1/q and 1/(1-q).
        clip_low, clip_high, dual_clip, advantage, count_after_eos, aggregation: as in `D1`.

    Raises:
        ValueError: a setting is out of range.

    Source: Gong et al. 2025 (DiffuCoder), arXiv:2506.20639, coupled sampling.
    """

    def __init__(
        self,
        *args: Any,
        mask_ratio: tuple[float, float] = (0.2, 0.8),
        normalize_coupled_weights: bool = False,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        advantage: str = "leave_one_out",
        count_after_eos: bool = False,
        aggregation: Aggregation = "token_mean",
        **base: Any,
    ) -> None:
        super().__init__(*args, **base)
        if len(mask_ratio) != 2 or not 0 < mask_ratio[0] <= mask_ratio[1] < 1:
            raise ValueError(
                f"method.mask_ratio={list(mask_ratio)} is not two ordered numbers inside (0, 1); paper: [0.2, 0.8]"
            )
        self.mask_ratio = (float(mask_ratio[0]), float(mask_ratio[1]))
        self.normalize_coupled_weights = normalize_coupled_weights
        self.advantage = estimator(advantage)
        self.count_after_eos = count_after_eos
        self.objective = ClippedObjective(ClipRange(clip_low, clip_high, dual_clip), aggregation, self.kl_coef)

    def corrupt(self, batch: SequenceBatch) -> Rows:
        """Three rows: the whole response hidden, a random part of it, and the rest of it."""
        low, high = self.mask_ratio
        drawn = draw_times(batch.response_mask, batch.noise_seed, (batch.iteration,), low=low, high=high, eps=0.0)
        return self.rows(drawn, batch)

    def rows(self, drawn: Masks, batch: SequenceBatch) -> Rows:
        """The three rows that belong to one drawn mask [B, 1, L] and its ratio [B, 1]."""
        masks = coupled_masks(drawn, batch.response_mask)
        weight = torch.ones_like(masks.level) if self.normalize_coupled_weights else inverse_level(masks.level)
        scored = masks.mask & self.counted(batch)[:, None]
        return noisy_rows(batch.ids, masks, self.policy.mask_token_id, weight[..., None], scored)

    def counted(self, batch: SequenceBatch) -> Tensor:
        """The tokens that count in the loss, bool [B, L]."""
        return batch.response_mask if self.count_after_eos else batch.completion_mask

    def log_likelihood(self, row_log_probs: Tensor, rows: Rows, batch: SequenceBatch) -> Tensor:
        """The coupled estimate of each token, float [B, L]; 0 where nothing counts."""
        return coupled_token_log_probs(row_log_probs, rows.weight)

    def advantages(self, rewards: Tensor) -> Tensor:
        """[prompts, group] -> [prompts, group]: reward minus the mean of the others in the group, by default."""
        return self.advantage(rewards)

    def policy_loss(
        self, log_likelihood: Tensor, old: Tensor, ref: Tensor | None, rows: Rows, batch: SequenceBatch
    ) -> LossOutput:
        """Token-level clipped surrogate, plus kl_coef times k3."""
        assert batch.advantage is not None  # the rollout fills it
        total, metrics = self.objective.total(log_likelihood, old, ref, batch.advantage, self.counted(batch))
        return LossOutput(total, metrics)

    def denominator(self, rows: Rows, batch: SequenceBatch) -> Tensor:
        """The tokens or sequences of this micro-batch, float64 [1]."""
        return self.objective.denominator(self.counted(batch), batch.response_mask.sum(-1))
