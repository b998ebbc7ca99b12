"""ESPO: one clipped ratio for each completion, from complementary pairs of masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dare_lightning.diffusion.corruption import Masks, draw_pairs
from dare_lightning.diffusion.likelihood import row_sums
from dare_lightning.diffusion.rows import Rows
from dare_lightning.methods.elbo_rows import elbo_rows
from dare_lightning.methods.sequence import ClippedSequenceMethod
from dare_lightning.replay.batch import SequenceBatch


class ESPO(ClippedSequenceMethod):
    """The ELBO of a completion per token is its log-prob; a pair of rows hides every token exactly once.

    Args:
        samples: noisy rows a completion; even where they are complementary pairs.
        complement: whether a second row hides what the first one shows; without it the estimate has more variance.
        advantage: reward minus the mean of the others in the group.
        clipped: as in `ClippedSequenceMethod`.

    Raises:
        ValueError: a setting is out of range.

    Source: arXiv:2512.03759.
    """

    def __init__(
        self, *args: Any, samples: int = 4, complement: bool = True, advantage: str = "leave_one_out", **clipped: Any
    ) -> None:
        super().__init__(*args, advantage=advantage, **clipped)
        if samples < 1:
            raise ValueError(f"method.samples={samples} must be at least 1: noisy rows of each sequence")
        if complement and samples % 2:
            raise ValueError(
                f"method.samples={samples} is odd, but rows come in complementary pairs; use {samples + 1}, or"
                " method.complement=false"
            )
        self.samples = samples
        self.complement = complement

    def corrupt(self, batch: SequenceBatch) -> Rows:
        """Pair after pair: l ~ U{0..L} tokens hidden, then the others."""
        pairs = self.samples // 2 if self.complement else self.samples
        drawn, rest = draw_pairs(self.counted(batch), batch.noise_seed, (batch.iteration,), pairs=pairs)
        return self.rows(drawn, rest, batch)

    def rows(self, drawn: Masks, rest: Masks, batch: SequenceBatch) -> Rows:
        """The rows of these masks and, where the method pairs them, of their complements, interleaved."""
        if not self.complement:
            return elbo_rows(self.policy, batch, drawn.mask, drawn.level[..., None])
        mask = torch.stack([drawn.mask, rest.mask], dim=2).flatten(1, 2)
        level = torch.stack([drawn.level, rest.level], dim=2).flatten(1, 2)
        return elbo_rows(self.policy, batch, mask, level[..., None])

    def log_likelihood(self, row_log_probs: Tensor, rows: Rows, batch: SequenceBatch) -> Tensor:
        """The ELBO of each pair in nats, float [B, pairs]."""
        values = row_sums(row_log_probs, rows.weight)
        return values.unflatten(1, (-1, 2)).mean(-1) if self.complement else values
