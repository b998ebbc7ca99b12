"""Noisy rows of supervised fine-tuning: at which levels, what is hidden, and what a hidden token weighs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dare_lightning.diffusion.blocks import draw_all_blocks
from dare_lightning.diffusion.corruption import draw_at_times, draw_times, stratified_times, uniform_draws
from dare_lightning.diffusion.likelihood import inverse_level
from dare_lightning.families.base import PolicyModel
from dare_lightning.replay.batch import SequenceBatch

LevelScope = Literal["sequence", "block"]
Weighting = Literal["inverse", "none"]

# Keeps the stream of replaced tokens apart from those of the masks (corruption.py has 1 and 2, blocks.py 11 to 13).
_REPLACED = 21


class Hidden(NamedTuple):
    """What the rows hide.

    Attributes:
        mask: bool [B, N, L].
        level: float, [B, N, L] or [B, N, 1], the probability or share at which a token was hidden.
    """

    mask: Tensor
    level: Tensor


@dataclass(frozen=True)
class SFTRows:
    """How rows are drawn.

    Attributes:
        samples: draws for each sequence, at evenly spread levels.
        level_scope: "sequence" has one level for the whole answer, "block" one for each block.
        levels: range of the level t.
        eps: lower bound of the mask probability p = (1 - eps) t + eps of a sequence.
        complement: each draw gives a second row that hides what the first shows.
        weighting: "inverse" weighs a hidden token 1 / (p + weight_eps), "none" 1.
        weight_eps: see there.
        replaced: probability that a token that stays visible is replaced by a random one, to be taught as well.

    Raises:
        ValueError: a setting is out of range, or two that do not go together.
    """

    samples: int = 1
    level_scope: LevelScope = "sequence"
    levels: tuple[float, float] = (0.0, 1.0)
    eps: float = 1e-3
    complement: bool = False
    weighting: Weighting = "inverse"
    weight_eps: float = 0.0
    replaced: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.eps < 1:
            raise ValueError(f"method.eps={self.eps} is outside [0, 1); the usual value is 1e-3")
        if self.weight_eps < 0:
            raise ValueError(f"method.weight_eps={self.weight_eps} is negative; use 0, or 1e-6 as dllm does")
        if self.samples < 1:
            raise ValueError(f"method.samples={self.samples} must be at least 1: noisy rows of each sequence")
        if self.level_scope not in ("sequence", "block"):
            raise ValueError(f"method.level_scope={self.level_scope!r}; use sequence or block")
        if self.weighting not in ("inverse", "none"):
            raise ValueError(f"method.weighting={self.weighting!r}; use inverse or none")
        if len(self.levels) != 2 or not 0 <= self.levels[0] <= self.levels[1] <= 1:
            raise ValueError(f"method.levels={list(self.levels)} is not ordered inside [0, 1]; LLaDA2 uses [0.3, 0.8]")
        if not 0 <= self.replaced < 1:
            raise ValueError(f"method.replaced={self.replaced} is outside [0, 1)")
        biased = [self.complement and self.level_scope == "block", self.replaced > 0]
        if self.weighting == "inverse" and any(biased):
            raise ValueError(
                "method.weighting=inverse has no weight for replaced tokens, nor for complements of whole blocks; use"
                " weighting=none with replaced, and with complement under level_scope=block"
            )

    @property
    def count(self) -> int:
        """Rows of each sequence."""
        return self.samples * (2 if self.complement else 1)

    def check(self, policy: PolicyModel) -> None:
        """Raise ValueError where these rows mean nothing to this policy."""
        if self.level_scope == "block" and policy.block_length is None:
            raise ValueError(
                f"method.level_scope=block is defined for block-diffusion policies, {type(policy).__name__} has no"
                " blocks: its tokens see the noise of every other; use level_scope=sequence"
            )

    def draw(self, policy: PolicyModel, batch: SequenceBatch) -> Hidden:
        """The rows of this batch and inner epoch."""
        low, high = self.levels
        response, salt = batch.response_mask, (batch.iteration,)
        if self.level_scope == "block":
            blocks = batch.block_ids(policy.block_length)
            assert blocks is not None  # `check` has seen to it
            bounds = {"rows": self.samples, "low": low, "high": high}
            drawn = draw_all_blocks(response, blocks, batch.noise_seed, salt, **bounds)  # type: ignore[arg-type]
            return self._completed(Hidden(drawn.mask, drawn.level), response)
        times = {"low": low, "high": high, "eps": self.eps}
        masks = draw_times(response, batch.noise_seed, salt, rows=self.samples, stratified=True, **times)
        return self._completed(Hidden(masks.mask, masks.level[..., None]), response)

    def fixed(self, batch: SequenceBatch, count: int) -> Hidden:
        """Rows whose levels and masks depend on a sample's place in the data alone.

        Samples take the levels (k + 1/2) / `count` of the range in turn, one for the whole answer.
        """
        place = batch.sample_index % count
        spread = stratified_times((place.double() + 0.5) / count, self.samples)
        low, high = self.levels
        times = low + (high - low) * spread
        masks = draw_at_times(batch.response_mask, batch.sample_index, times, eps=self.eps)
        return self._completed(Hidden(masks.mask, masks.level[..., None]), batch.response_mask)

    def weight(self, level: Tensor) -> Tensor:
        """What a hidden token of this level weighs."""
        return inverse_level(level + self.weight_eps) if self.weighting == "inverse" else torch.ones_like(level)

    def replacements(self, policy: PolicyModel, batch: SequenceBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The visible response tokens that are replaced, bool [B, N, L], and by what, int64 [B, N, L].

        Source: the editing stream of LLaDA2.1, arXiv:2602.08676, whose recipe is not public.
        """
        rows, salt = hidden.shape[1], (_REPLACED, batch.iteration)
        _, uniform = uniform_draws(batch.response_mask, batch.noise_seed, salt, 2 * rows)
        chosen, which = uniform.to(hidden.device).chunk(2, 1)
        tokens = (which * (len(policy.tokenizer) - 1)).long()
        tokens += (tokens >= policy.mask_token_id).long()
        visible = batch.response_mask[:, None] & ~hidden
        return visible & (chosen < self.replaced), tokens

    def _completed(self, hidden: Hidden, response: Tensor) -> Hidden:
        if not self.complement:
            return hidden
        mask, level = hidden
        return Hidden(torch.cat([mask, response[:, None] & ~mask], 1), torch.cat([level, 1 - level], 1))
