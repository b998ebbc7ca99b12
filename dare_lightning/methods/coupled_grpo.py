"""Coupled-GRPO: policy gradients with two complementary masks, so that every token is scored in a noisy context."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dare_lightning.diffusion.corruption import Masks, coupled_masks, draw_times, noisy_rows
from dare_lightning.diffusion.likelihood import coupled_token_log_probs, inverse_level
from dare_lightning.diffusion.rows import Rows
from dare_lightning.methods.clipped import ClippedTokenMethod
from dare_lightning.replay.batch import SequenceBatch


class CoupledGRPO(ClippedTokenMethod):
    """Score every completion token twice: with everything hidden, and in the one of two complementary masks it is in.

    Args:
        mask_ratio: the ratio q of the first mask is uniform in this range, inside (0, 1).
        normalize_coupled_weights: weigh the two masks by 1 instead of 1/q and 1/(1-q).
        advantage: the paper subtracts the mean of the others in the group.
        clipped: as in `ClippedTokenMethod`.

    Raises:
        ValueError: a setting is out of range.

    Source: Gong et al. 2025 (DiffuCoder), arXiv:2506.20639, coupled sampling.
    """

    def __init__(
        self,
        *args: Any,
        mask_ratio: tuple[float, float] = (0.2, 0.8),
        normalize_coupled_weights: bool = False,
        advantage: str = "leave_one_out",
        **clipped: Any,
    ) -> None:
        super().__init__(*args, advantage=advantage, **clipped)
        if len(mask_ratio) != 2 or not 0 < mask_ratio[0] <= mask_ratio[1] < 1:
            raise ValueError(
                f"method.mask_ratio={list(mask_ratio)} is not two ordered numbers inside (0, 1); paper: [0.2, 0.8]"
            )
        self.mask_ratio = (float(mask_ratio[0]), float(mask_ratio[1]))
        self.normalize_coupled_weights = normalize_coupled_weights

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

    def log_likelihood(self, row_log_probs: Tensor, rows: Rows, batch: SequenceBatch) -> Tensor:
        """The coupled estimate of each token, float [B, L]; 0 where nothing counts."""
        return coupled_token_log_probs(row_log_probs, rows.weight)
