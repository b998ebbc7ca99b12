"""Which keys a token sees in block diffusion, and attention that does not compute what is never seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

QUERIES = 128
"""Queries whose keys are looked up together."""

Masked = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(q, k, v, additive bias or None) -> attention output."""


def sees(query_block: Tensor, query_copy: Tensor, key_block: Tensor, key_copy: Tensor) -> Tensor:
    """Whether a query sees a key: bool, elementwise with broadcasting.

    A token sees the whole of its own block in its own copy of the sequence, and all earlier blocks in the clean copy,
    which is copy 0. So noisy tokens see clean history, clean tokens no noise, and a sequence without noisy copies is
    block-causal. Padding (block -1) is seen by padding alone, which spares the softmax empty rows.

    Source: Arriola et al. 2025, arXiv:2503.09573, section 3.2; SDAR and LLaDA2 agree.
    """
    own = (query_block == key_block) & (query_copy == key_copy)
    return own | ((key_copy == 0) & (query_block > key_block) & (key_block >= 0))


@dataclass(frozen=True)
class BlockVisibility:
    """Visibility as a rule over two numbers of each token, instead of a tensor over pairs.

    Attributes:
        block: int64 [B, L], the token's block in its sequence; -1 where there is no token.
        copy: int64 [B, L], 0 in the clean copy of the sequence, other numbers in noisy ones.
    """

    block: Tensor
    copy: Tensor

    def pairs(self, queries: slice = slice(None)) -> Tensor:
        """bool [B, Q, L]: what these queries see."""
        block, copy = self.block[:, queries, None], self.copy[:, queries, None]
        return sees(block, copy, self.block[:, None], self.copy[:, None])

    def rule(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """The same as a function of the numbers of row, head, query and key, which flex_attention takes."""
        block, copy = self.block, self.copy

        def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return sees(block[batch, query], copy[batch, query], block[batch, key], copy[batch, key])

        return seen


class Trimmed:
    """Attention of `QUERIES` queries at a time to the keys that any of them sees, under one lookup for all layers.

    Args:
        compute: attention under an additive bias.
        visibility: of tokens that are queries and keys.
        additive: bool mask [B, Q, K] and dtype -> bias [B, 1, Q, K].
    """

    def __init__(
        self, compute: Masked, visibility: BlockVisibility, additive: Callable[[Tensor, torch.dtype], Tensor]
    ) -> None:
        self._compute, self._visibility, self._additive = compute, visibility, additive
        self._parts: list[tuple[slice, list[slice], Tensor | None]] = []
        self._dtype: torch.dtype | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._dtype != q.dtype:
            self._parts, self._dtype = self._lookup(q.shape[2], q.dtype), q.dtype
        out = []
        for queries, runs, bias in self._parts:
            keys, values = (torch.cat([part[:, :, run] for run in runs], 2) for part in (k, v))
            out.append(self._compute(q[:, :, queries], keys, values, bias))
        return torch.cat(out, 2)

    def _lookup(self, length: int, dtype: torch.dtype) -> list[tuple[slice, list[slice], Tensor | None]]:
        parts: list[tuple[slice, list[slice], Tensor | None]] = []
        for start in range(0, length, QUERIES):
            queries = slice(start, min(start + QUERIES, length))
            pairs = self._visibility.pairs(queries)
            used = pairs.flatten(0, 1).any(0)
            pairs = pairs[:, :, used]
            bias = None if bool(pairs.all()) else self._additive(pairs, dtype)
            parts.append((queries, _runs(used), bias))
        return parts


def _runs(used: Tensor) -> list[slice]:
    """The runs of True in a bool [L]."""
    columns = used.nonzero().flatten()
    breaks = (columns.diff() != 1).nonzero().flatten() + 1
    return [slice(int(run[0]), int(run[-1]) + 1) for run in columns.tensor_split(breaks.cpu())]
