"""What a corruption hook returns: the noisy inputs to score, and what to score in them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """N noisy inputs for each of B sequences; every method is a way to choose them.

    Attributes:
        noisy_ids: int64 [B, N, L], what the model reads.
        score_mask: bool [B, N, L], positions whose log-prob is computed; elsewhere it is 0.
        weight: float [B, N, L], the estimator's weight of each scored position.
        target_ids: int64 [B, N, L], tokens to score; None where they are the clean tokens.
        level: float [B, N], the mask probability or ratio the row was drawn at, where there is one.
        index: int64 [N], which of a sequence's rows these are, where the rows have columns of the batch that go with
            them.
    """

    noisy_ids: Tensor
    score_mask: Tensor
    weight: Tensor
    target_ids: Tensor | None = None
    level: Tensor | None = None
    index: Tensor | None = None

    @property
    def count(self) -> int:
        """N, the rows of each sequence."""
        return self.noisy_ids.shape[1]

    def select(self, rows: slice) -> Rows:
        """These of the N rows, for every sequence."""
        return replace(
            self,
            noisy_ids=self.noisy_ids[:, rows],
            score_mask=self.score_mask[:, rows],
            weight=self.weight[:, rows],
            target_ids=None if self.target_ids is None else self.target_ids[:, rows],
            level=None if self.level is None else self.level[:, rows],
            index=None if self.index is None else self.index[rows],
        )
