"""The noisy rows of a sequence's Monte Carlo ELBO, for whatever method is built on one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from dare_lightning.diffusion.blocks import draw_all_blocks
from dare_lightning.diffusion.corruption import Masks, draw_counts, noisy_rows
from dare_lightning.diffusion.likelihood import inverse_level
from dare_lightning.diffusion.rows import Rows
from dare_lightning.families.base import PolicyModel
from dare_lightning.replay.batch import SequenceBatch

LevelScope = Literal["sequence", "block"]


@dataclass(frozen=True)
class ElboRows:
    """`samples` rows in the discrete form: l of L tokens hidden, each weighted by L / l, the levels stratified.

    Attributes:
        samples: noisy rows a sequence.
        level_scope: "sequence" draws one level for the whole answer, exact for masked and for block policies; "block"
            one for each block, of lower variance, for block policies alone.

    Raises:
        ValueError: a setting is out of range.
    """

    samples: int
    level_scope: LevelScope = "sequence"

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"method.samples={self.samples} must be at least 1: noisy rows of each sequence")
        if self.level_scope not in ("sequence", "block"):
            raise ValueError(f"method.level_scope={self.level_scope!r}; use sequence or block")

    def check(self, policy: PolicyModel) -> None:
        """Raise ValueError where these rows mean nothing to this policy."""
        if self.level_scope == "block" and policy.block_length is None:
            raise ValueError(
                f"method.level_scope=block needs a block-diffusion policy, {type(policy).__name__} has no blocks: its"
                " tokens see the noise of every other; use level_scope=sequence"
            )

    def draw(self, policy: PolicyModel, batch: SequenceBatch, maskable: Tensor) -> Rows:
        """The rows of this batch and inner epoch; `maskable` is bool [B, L], the tokens whose likelihood is asked."""
        salt = (batch.iteration,)
        if self.level_scope == "block":
            blocks = batch.block_ids(policy.block_length)
            assert blocks is not None  # `check` has seen to it
            drawn = draw_all_blocks(maskable, blocks, batch.noise_seed, salt, rows=self.samples)
            return elbo_rows(policy, batch, drawn.mask, drawn.level)
        masks = draw_counts(maskable, batch.noise_seed, salt, rows=self.samples, stratified=True)
        return elbo_rows(policy, batch, masks.mask, masks.level[..., None])


def elbo_rows(policy: PolicyModel, batch: SequenceBatch, mask: Tensor, level: Tensor) -> Rows:
    """The rows that hide `mask`, every hidden token scored with weight 1 / level.

    Args:
        mask: bool [B, N, L].
        level: float, broadcastable to it; the probability or share at which a token was hidden.
    """
    row_level = level.expand(mask.shape).amax(-1)
    return noisy_rows(batch.ids, Masks(mask, row_level), policy.mask_token_id, inverse_level(level), mask)
