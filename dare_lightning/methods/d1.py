"""diffu-GRPO: policy gradients on the one-step likelihood of a masked diffusion policy."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from dare_lightning.diffusion.corruption import Masks, draw_prompt, noisy_rows
from dare_lightning.diffusion.rows import Rows
from dare_lightning.methods.clipped import ClippedTokenMethod
from dare_lightning.replay.batch import SequenceBatch


class D1(ClippedTokenMethod):
    """Score every completion token at once from a fully hidden response, with part of the prompt hidden as well.

    Args:
        prompt_mask_probability: each prompt token is hidden with this probability, anew in every inner epoch.
        advantage: the paper subtracts the group's mean and does not divide by its deviation.
        clipped: as in `ClippedTokenMethod`.

    Raises:
        ValueError: a setting is out of range.

    Source: Zhao et al. 2025 (d1), arXiv:2504.12216, diffu-GRPO.
    """

    additive_rows: ClassVar[bool] = True

    def __init__(
        self, *args: Any, prompt_mask_probability: float = 0.15, advantage: str = "no_std", **clipped: Any
    ) -> None:
        super().__init__(*args, advantage=advantage, **clipped)
        if not 0 <= prompt_mask_probability <= 1:
            raise ValueError(
                f"method.prompt_mask_probability={prompt_mask_probability} is outside [0, 1]; d1 uses 0.15"
            )
        self.prompt_mask_probability = prompt_mask_probability

    def corrupt(self, batch: SequenceBatch) -> Rows:
        """One row: the whole response hidden, and each prompt token with `prompt_mask_probability`."""
        salt = (batch.iteration,)
        prompt = draw_prompt(batch.prompt_mask, batch.noise_seed, salt, probability=self.prompt_mask_probability)
        return self.rows(prompt, batch)

    def rows(self, hidden_prompt: Tensor, batch: SequenceBatch) -> Rows:
        """The row that hides these prompt tokens, bool [B, L]."""
        mask = (hidden_prompt | batch.response_mask)[:, None]
        level = batch.noise_seed.new_ones(len(batch), 1).float()
        return noisy_rows(
            batch.ids, Masks(mask, level), self.policy.mask_token_id, level[..., None], self.counted(batch)[:, None]
        )

    def log_likelihood(self, row_log_probs: Tensor, rows: Rows, batch: SequenceBatch) -> Tensor:
        """One-step log-prob of each token, float [B, L]."""
        return row_log_probs.squeeze(1)
