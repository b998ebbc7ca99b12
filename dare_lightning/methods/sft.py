"""Supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dare_lightning.diffusion.corruption import Masks, noisy_rows, tie_trailing_eos
from dare_lightning.diffusion.likelihood import row_sums
from dare_lightning.diffusion.rows import Rows
from dare_lightning.methods.base import DiffusionPolicyModule, LossOutput
from dare_lightning.methods.sft_rows import Hidden, LevelScope, SFTRows, Weighting
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
        level_scope, levels, complement, weighting, replaced: see `SFTRows`.
        tie_trailing_eos: hide the run of end tokens that closes an answer as a whole, or not at all.
        validation_levels: the held-out loss is taken at this many fixed levels, with fixed masks.

    Raises:
        ValueError: a setting is out of range, or the levels mean nothing to this policy.

    Source: LLaDA, arXiv:2502.09992, supervised fine-tuning as its guidelines document it; for block policies SDAR,
    arXiv:2510.06303, and LLaDA2, arXiv:2512.15745.
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
        level_scope: LevelScope = "sequence",
        levels: Sequence[float] = (0.0, 1.0),
        complement: bool = False,
        weighting: Weighting = "inverse",
        replaced: float = 0.0,
        tie_trailing_eos: bool = False,
        validation_levels: int = 8,
        **base: Any,
    ) -> None:
        super().__init__(*args, **base)
        if self.kl_coef > 0:
            raise ValueError(f"method.kl_coef={self.kl_coef}: supervised fine-tuning has no reference; leave it at 0")
        if normalization not in NORMALIZATIONS:
            raise ValueError(f"method.normalization={normalization!r}; choose one of {', '.join(NORMALIZATIONS)}")
        if validation_levels < 1:
            raise ValueError(f"method.validation_levels={validation_levels} must be at least 1")
        if tie_trailing_eos and level_scope == "block":
            raise ValueError("method.tie_trailing_eos hides a run of tokens at one level; use level_scope=sequence")
        band = tuple(float(level) for level in levels)
        self.drawn = SFTRows(samples, level_scope, band, eps, complement, weighting, weight_eps, replaced)  # type: ignore[arg-type]
        self.drawn.check(self.policy)
        self.normalization: Normalization = normalization
        self.tie_trailing_eos = tie_trailing_eos
        self.validation_levels = validation_levels

    def corrupt(self, batch: SequenceBatch) -> Rows:
        """Rows at evenly spread random levels."""
        return self._rows(self.drawn.draw(self.policy, batch), batch)

    def rows(self, masks: Masks, batch: SequenceBatch) -> Rows:
        """The rows of these masks; hidden tokens outside `completion_mask` are read but not scored."""
        return self._rows(Hidden(masks.mask, masks.level[..., None]), batch)

    def _rows(self, hidden: Hidden, batch: SequenceBatch) -> Rows:
        mask, level = hidden
        if self.tie_trailing_eos:
            mask = tie_trailing_eos(mask, batch.ids, batch.response_mask, self.policy.eos_token_id)
        counted = batch.completion_mask[:, None]
        masks = Masks(mask, level.amax(-1))
        weight = self.drawn.weight(level)
        rows = noisy_rows(batch.ids, masks, self.policy.mask_token_id, weight, mask & counted)
        if self.drawn.replaced == 0:
            return rows
        replaced, tokens = self.drawn.replacements(self.policy, batch, mask)
        scored = (mask | replaced) & counted
        noisy = torch.where(replaced, tokens, rows.noisy_ids)
        return replace(rows, noisy_ids=noisy, score_mask=scored, weight=weight * scored)

    def log_likelihood(self, row_log_probs: Tensor, rows: Rows, batch: SequenceBatch) -> Tensor:
        """These rows' share of the Monte Carlo ELBO, float [B]."""
        return row_sums(row_log_probs, rows.weight).sum(-1) / self.drawn.count

    def draws(self, row_log_probs: Tensor, rows: Rows, batch: SequenceBatch) -> Tensor:
        """The ELBO of each row in nats, float [B, n]."""
        return row_sums(row_log_probs, rows.weight)

    def advantages(self, rewards: Tensor) -> Tensor:
        """Supervised data have no rewards."""
        raise ValueError("supervised fine-tuning uses no rewards; choose a method with a rollout for them")

    def policy_loss(
        self, log_likelihood: Tensor, old: Tensor, ref: Tensor | None, rows: Rows, batch: SequenceBatch
    ) -> LossOutput:
        """Negative ELBO, divided by the answer's length under "sequence"."""
        length = batch.completion_mask.sum(-1)
        loss = -log_likelihood
        # These rows are a part of all where a chunk of them is differentiated at a time.
        share = length.sum().to(loss) * rows.count / self.drawn.count
        metrics = {"nelbo_per_token": (loss.detach().sum(), share)}
        if self.normalization == "sequence":
            loss = loss / length.clamp(min=1)
        return LossOutput(loss.sum().view(1), metrics)

    def denominator(self, rows: Rows, batch: SequenceBatch) -> Tensor:
        """Sequences, answer tokens or hidden tokens, float64 [1]."""
        if self.normalization == "masked_tokens":
            return rows.score_mask.sum().double().view(1) / self.drawn.count
        if self.normalization == "token":
            return batch.completion_mask.sum().double().view(1)
        return torch.tensor([len(batch)], dtype=torch.float64, device=batch.ids.device)

    def validation_rows(self, batch: SequenceBatch) -> Rows:
        """Rows whose levels and masks depend on a sample's place in the data alone, the same at every validation.

        Samples take the levels (k + 1/2) / `validation_levels` in turn.
        """
        return self._rows(self.drawn.fixed(batch, self.validation_levels), batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """The held-out loss at fixed levels and masks, so that two validations differ by the policy alone."""
        if not isinstance(batch, SequenceBatch):
            return
        rows = self.validation_rows(batch)
        denominator = self.denominator(rows, batch)
        with self.cost.spent_on("validation"):
            loss, _ = self.loss_and_metrics(rows, replace(batch, denominator=denominator))
        # Weighed by what they were divided by, the batches' means are the mean over all of them.
        weight = round(float(denominator) * self.drawn.count)
        self.log("val/loss", loss, batch_size=weight, prog_bar=True, sync_dist=True)
