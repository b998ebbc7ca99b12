"""Supervised fine-tuning of masked diffusion policies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dare_lightning.diffusion.corruption import (
    Masks,
    draw_at_times,
    draw_times,
    noisy_rows,
    stratified_times,
    tie_trailing_eos,
)
from dare_lightning.diffusion.likelihood import inverse_level, row_sums
from dare_lightning.diffusion.rows import Rows
from dare_lightning.methods.base import DiffusionPolicyModule, LossOutput
from dare_lightning.replay.batch import SequenceBatch

Normalization = Literal["sequence", "token", "batch", "masked_tokens"]
NORMALIZATIONS: tuple[str, ...] = ("sequence", "token", "batch", "masked_tokens")


class SFT(DiffusionPolicyModule):
    """Predict the hidden tokens of the answer at random noise levels, each weighted by 1/p.

    Args:
        normalization: what the summed loss is divided by. "sequence": each answer's own length, then the number of
            sequences (an unbiased negative ELBO per token); "token": the answer tokens of the step; "batch": its
            sequences; "masked_tokens": its hidden tokens, which counts 1/p twice in expectation.
        eps: lower bound of the mask probability, p = (1 - eps) t + eps.
        weight_eps: a hidden token weighs 1 / (p + weight_eps).
        samples: noisy rows for each sequence, at evenly spread levels.
        tie_trailing_eos: hide the run of end tokens that closes an answer as a whole, or not at all.
        validation_levels: the held-out loss is taken at this many fixed levels, with fixed masks.

    Raises:
        ValueError: a setting is out of range.

    Source: LLaDA, arXiv:2502.09992, supervised fine-tuning as its guidelines document it.
    """

    online: ClassVar[bool] = False
    additive_rows: ClassVar[bool] = True

    def __init__(
        self,
        *args: Any,
        normalization: Normalization = "sequence",
        eps: float = 1e-3,
        weight_eps: float = 0.0,
        samples: int = 1,
        tie_trailing_eos: bool = False,
        validation_levels: int = 8,
        **base: Any,
    ) -> None:
        super().__init__(*args, **base)
        if self.kl_coef > 0:
            raise ValueError(f"method.kl_coef={self.kl_coef}: supervised fine-tuning has no reference; leave it at 0")
        if normalization not in NORMALIZATIONS:
            raise ValueError(f"method.normalization={normalization!r}; choose one of {', '.join(NORMALIZATIONS)}")
        if not 0 <= eps < 1:
            raise ValueError(f"method.eps={eps} is outside [0, 1); the usual value is 1e-3")
        if weight_eps < 0:
            raise ValueError(f"method.weight_eps={weight_eps} is negative; use 0, or 1e-6 as dllm does")
        if samples < 1 or validation_levels < 1:
            raise ValueError(f"method.samples={samples} and method.validation_levels={validation_levels} start at 1")
        self.normalization: Normalization = normalization
        self.eps = eps
        self.weight_eps = weight_eps
        self.samples = samples
        self.tie_trailing_eos = tie_trailing_eos
        self.validation_levels = validation_levels

    def corrupt(self, batch: SequenceBatch) -> Rows:
        """`samples` rows at evenly spread random levels."""
        masks = draw_times(
            batch.response_mask,
            batch.noise_seed,
            (batch.iteration,),
            rows=self.samples,
            eps=self.eps,
            stratified=True,
        )
        return self.rows(masks, batch)

    def rows(self, masks: Masks, batch: SequenceBatch) -> Rows:
        """The rows of these masks; hidden tokens outside `completion_mask` are read but not scored."""
        mask = masks.mask
        if self.tie_trailing_eos:
            mask = tie_trailing_eos(mask, batch.ids, batch.response_mask, self.policy.eos_token_id)
        weight = inverse_level(masks.level + self.weight_eps)[..., None]
        scored = mask & batch.completion_mask[:, None]
        return noisy_rows(batch.ids, Masks(mask, masks.level), self.policy.mask_token_id, weight, scored)

    def log_likelihood(self, row_log_probs: Tensor, rows: Rows, batch: SequenceBatch) -> Tensor:
        """These rows' share of the Monte Carlo ELBO, float [B]."""
        return row_sums(row_log_probs, rows.weight).sum(-1) / self.samples

    def advantages(self, rewards: Tensor) -> Tensor:
        """Supervised data have no rewards."""
        raise ValueError("supervised fine-tuning uses no rewards; choose a method with a rollout for them")

    def policy_loss(
        self, log_likelihood: Tensor, old: Tensor, ref: Tensor | None, rows: Rows, batch: SequenceBatch
    ) -> LossOutput:
        """Negative ELBO, divided by the answer's length under "sequence"."""
        length = batch.completion_mask.sum(-1)
        loss = -log_likelihood
        # These rows are a part of `samples` where a chunk of them is differentiated at a time.
        share = length.sum().to(loss) * rows.count / self.samples
        metrics = {"nelbo_per_token": (loss.detach().sum(), share)}
        if self.normalization == "sequence":
            loss = loss / length.clamp(min=1)
        return LossOutput(loss.sum().view(1), metrics)

    def denominator(self, rows: Rows, batch: SequenceBatch) -> Tensor:
        """Sequences, answer tokens or hidden tokens, float64 [1]."""
        if self.normalization == "masked_tokens":
            return rows.score_mask.sum().double().view(1) / self.samples
        if self.normalization == "token":
            return batch.completion_mask.sum().double().view(1)
        return torch.tensor([len(batch)], dtype=torch.float64, device=batch.ids.device)

    def validation_rows(self, batch: SequenceBatch) -> Rows:
        """Rows whose levels and masks depend on a sample's place in the data alone, the same at every validation.

        Samples take the levels (k + 1/2) / `validation_levels` in turn.
        """
        place = batch.sample_index % self.validation_levels
        times = stratified_times((place.double() + 0.5) / self.validation_levels, self.samples)
        return self.rows(draw_at_times(batch.response_mask, batch.sample_index, times, eps=self.eps), batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """The held-out loss at fixed levels and masks, so that two validations differ by the policy alone."""
        if not isinstance(batch, SequenceBatch):
            return
        rows = self.validation_rows(batch)
        denominator = self.denominator(rows, batch)
        loss, _ = self.loss_and_metrics(rows, replace(batch, denominator=denominator))
        # Weighed by what they were divided by, the batches' means are the mean over all of them.
        weight = round(float(denominator) * self.samples)
        self.log("val/loss", loss, batch_size=weight, prog_bar=True, sync_dist=True)
