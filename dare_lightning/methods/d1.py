"""diffu-GRPO: policy gradients on the one-step likelihood of a masked diffusion policy."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from dare_lightning.diffusion.advantages import estimator
from dare_lightning.diffusion.corruption import Masks, draw_prompt, noisy_rows
from dare_lightning.diffusion.losses import Aggregation, ClippedObjective, ClipRange
from dare_lightning.diffusion.rows import Rows
from dare_lightning.methods.base import DiffusionPolicyModule, LossOutput
from dare_lightning.replay.batch import SequenceBatch


class D1(DiffusionPolicyModule):
    """Score every completion token at once from a fully hidden response, with part of the prompt hidden as well.

    Args:
        prompt_mask_probability: each prompt token is hidden with this probability, anew in every inner epoch.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: bound of the loss of tokens with negative advantage, above 1; None for no bound.
        advantage: name of the group-relative estimator.
        count_after_eos: whether response tokens after the first end token count in the loss.
        aggregation: how token losses are averaged.

    Raises:
        ValueError: a setting is out of range.

    Source: Zhao et al. 2025 (d1), arXiv:2504.12216, diffu-GRPO.
    """

    additive_rows: ClassVar[bool] = True

    def __init__(
        self,
        *args: Any,
        prompt_mask_probability: float = 0.15,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        advantage: str = "no_std",
        count_after_eos: bool = False,
        aggregation: Aggregation = "token_mean",
        **base: Any,
    ) -> None:
        super().__init__(*args, **base)
        if not 0 <= prompt_mask_probability <= 1:
            raise ValueError(
                f"method.prompt_mask_probability={prompt_mask_probability} is outside [0, 1]; d1 uses 0.15"
            )
        self.prompt_mask_probability = prompt_mask_probability
        self.advantage = estimator(advantage)
        self.count_after_eos = count_after_eos
        self.objective = ClippedObjective(ClipRange(clip_low, clip_high, dual_clip), aggregation, self.kl_coef)

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

    def counted(self, batch: SequenceBatch) -> Tensor:
        """The tokens that count in the loss, bool [B, L]."""
        return batch.response_mask if self.count_after_eos else batch.completion_mask

    def log_likelihood(self, row_log_probs: Tensor, rows: Rows, batch: SequenceBatch) -> Tensor:
        """One-step log-prob of each token, float [B, L]."""
        return row_log_probs.squeeze(1)

    def advantages(self, rewards: Tensor) -> Tensor:
        """[prompts, group] -> [prompts, group]: reward minus the group's mean, by default."""
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
