"""EBPO: one clipped ratio for each completion, from the likelihood of all its blocks in one forward pass a level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from dare_lightning.diffusion.likelihood import row_sums
from dare_lightning.diffusion.rows import Rows
from dare_lightning.methods.defined import Undefined
from dare_lightning.methods.elbo_rows import ElboRows
from dare_lightning.methods.sequence import ClippedSequenceMethod
from dare_lightning.replay.batch import SequenceBatch


class EBPO(ClippedSequenceMethod):
    """Hide part of every block at once; each is scored given the clean blocks before it.

    Args:
        samples: noisy rows a completion ("timesteps").
        timestep_weights: weight of each row, `samples` numbers; None weighs them by 1 / samples.
        advantage: reward minus the group's mean, divided by its deviation.
        clip_high: the report clips more widely above than below, without numbers.
        clipped: as in `ClippedSequenceMethod`.

    Raises:
        ValueError: a setting is out of range, or the policy has no blocks.

    Source: LLaDA2.1, arXiv:2602.08676 equations 4 and 5; the noise as DARE reads it.
    """

    undefined: ClassVar[tuple[Undefined, ...]] = (
        Undefined(
            "masked",
            "it scores every block given the clean blocks before it, in one [noisy ; clean] pass; use method=bgpo or"
            " espo",
        ),
    )

    def __init__(
        self,
        *args: Any,
        samples: int = 16,
        timestep_weights: Sequence[float] | None = None,
        advantage: str = "grpo",
        clip_high: float = 0.28,
        **clipped: Any,
    ) -> None:
        super().__init__(*args, advantage=advantage, clip_high=clip_high, **clipped)
        self.noise = ElboRows(samples, "block")
        weights = [1 / samples] * samples if timestep_weights is None else [float(w) for w in timestep_weights]
        if len(weights) != samples or min(weights) < 0 or sum(weights) <= 0:
            raise ValueError(
                f"method.timestep_weights={weights} must be {samples} numbers of at least 0, one for each of"
                " method.samples, or null"
            )
        self.timestep_weights = weights

    def corrupt(self, batch: SequenceBatch) -> Rows:
        """`samples` rows that each hide a share of every block; the shares are evenly spread over blocks and rows."""
        return self.noise.draw(self.policy, batch, self.counted(batch))

    def log_likelihood(self, row_log_probs: Tensor, rows: Rows, batch: SequenceBatch) -> Tensor:
        """The block ELBO of each row in nats, float [B, N]."""
        return row_sums(row_log_probs, rows.weight)

    def estimate(self, draws: Tensor) -> Tensor:
        """The weighted sum over rows, float [B]."""
        return draws @ torch.tensor(self.timestep_weights, dtype=draws.dtype, device=draws.device)
