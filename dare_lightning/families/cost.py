"""What was read: forward passes and tokens, counted where every family reads (`attention.run_stack`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor


class Cost:
    """Counts the forward passes of this process, by what they were for.

    One forward pass is one row of ids read once by the network: with a cache or without, with a gradient or without.
    Its tokens are the columns of it that exist; of a pass over a piece of a sequence, those of the piece. Rows that are
    read once for several sequences count once. A block-diffusion row holds the clean sequence and its noisy copies, and
    is one pass of so many more tokens. What a backward pass computes again inside of a layer
    (`gradient_checkpointing`) belongs to the backward pass and is not counted; a whole forward pass that is made again
    (`gradient_plan=replay`) is.

    Nothing is counted but inside of `spent_on`.
    """

    def __init__(self) -> None:
        self._passes: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        # Sums of masks stay on their device until somebody asks, so that no pass waits for them.
        self._pending: dict[str, Tensor] = {}

    @contextmanager
    def spent_on(self, purpose: str) -> Iterator[None]:
        """Count what runs in the body as this; inside of another purpose it remains that one's."""
        if _active.get() is not None:
            yield
            return
        token = _active.set((self, purpose))
        try:
            yield
        finally:
            _active.reset(token)

    def passes(self, *purposes: str) -> int:
        """Forward passes made for these."""
        return sum(self._passes.get(purpose, 0) for purpose in purposes)

    def tokens(self, *purposes: str) -> int:
        """Tokens read for these."""
        for purpose, count in self._pending.items():
            self._tokens[purpose] = self._tokens.get(purpose, 0) + int(count)
        self._pending.clear()
        return sum(self._tokens.get(purpose, 0) for purpose in purposes)

    def restore(self, passes: Mapping[str, int], tokens: Mapping[str, int]) -> None:
        """Go on from these counts, by purpose."""
        self._passes, self._tokens = dict(passes), dict(tokens)
        self._pending.clear()

    def _add(self, purpose: str, ids: Tensor, exists: Tensor | None) -> None:
        self._passes[purpose] = self._passes.get(purpose, 0) + len(ids)
        if exists is None:
            self._tokens[purpose] = self._tokens.get(purpose, 0) + ids.numel()
        else:
            known = self._pending.get(purpose, torch.zeros((), dtype=torch.int64, device=exists.device))
            self._pending[purpose] = known.to(exists.device) + exists.sum()


_active: ContextVar[tuple[Cost, str] | None] = ContextVar("cost", default=None)


def is_counting() -> bool:
    """Whether passes are counted now."""
    return _active.get() is not None


def count_pass(ids: Tensor, exists: Tensor | None) -> None:
    """Count a pass over ids [B, L] for whoever asked; `exists` bool [B, L], None where all tokens do."""
    active = _active.get()
    if active is not None:
        cost, purpose = active
        cost._add(purpose, ids, exists)
