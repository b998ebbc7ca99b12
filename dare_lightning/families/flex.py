"""PyTorch's flex_attention under masks that are prepared once for each shape."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dare_lightning.families.visibility import BlockVisibility

TILE = 128
"""Columns that flex_attention looks at together; sequences are filled up to whole tiles."""

KEPT = 16
"""Prepared masks that are remembered, one for each shape, the least used given up first."""

FORWARD_ONLY = "attention=flex has no backward pass on the CPU; train with sdpa, and roll out with flex"


class Flex:
    """flex_attention, which skips the tiles that nobody sees; compiled on a GPU.

    Queries and keys are filled up to whole tiles, so that rows of nearly the same length share one compiled graph and
    one prepared mask. A mask is prepared anew only where a pass of its shape shows something else.

    Args:
        mask: bool [B, S], [B, L, S] or [B, 1, S], or a rule over blocks; None where everything is visible.

    Raises:
        ValueError: a gradient is asked for on the CPU, where flex_attention has none.
    """

    def __init__(self, mask: Tensor | BlockVisibility | None) -> None:
        self._mask = mask
        self._prepared: Any = None
        self._lengths: tuple[int, int] | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.device.type == "cpu" and torch.is_grad_enabled() and any(part.requires_grad for part in (q, k, v)):
            raise ValueError(FORWARD_ONLY)
        lengths = q.shape[2], k.shape[2]
        if self._lengths != lengths:
            self._prepared, self._lengths = prepared(self._mask, q.shape[0], *lengths, q.device), lengths
        tiles = [_filled(part, -part.shape[2] % TILE) for part in (q, k, v)]
        run = _flex_attention(q.device.type != "cpu")
        out: Tensor = run(*tiles, block_mask=self._prepared, enable_gqa=q.shape[1] != k.shape[1])
        return out[:, :, : lengths[0]]


def prepared(
    mask: Tensor | BlockVisibility | None, rows: int, queries: int, keys: int, device: torch.device
) -> Any | None:
    """The BlockMask of a mask over filled-up queries and keys; None where nothing is hidden.

    It is remembered under its shape: a pass that shows the same tokens the same way finds it there.
    """
    if mask is None and keys % TILE == 0:
        return None
    shape = (-(-queries // TILE) * TILE, -(-keys // TILE) * TILE)
    if isinstance(mask, BlockVisibility):
        # Filling has block -1, which real tokens do not see.
        content = [F.pad(part, (0, shape[1] - keys), value=-1) for part in (mask.block, mask.copy)]
    else:
        content = [_pairs(mask, rows, queries, keys, device, shape)]
    key = (type(mask).__name__, len(content[0]), *shape, str(device))
    known = _MASKS.get(key)
    if known is None or not all(torch.equal(*pair) for pair in zip(known[0], content, strict=True)):
        known = (content, _create(content, *shape, device))
        _MASKS[key] = known
        while len(_MASKS) > KEPT:
            _MASKS.popitem(last=False)
    _MASKS.move_to_end(key)
    return known[1]


_MASKS: OrderedDict[tuple[Any, ...], tuple[list[Tensor], Any]] = OrderedDict()
"""shape -> (what the mask says, the BlockMask made from it)."""


def _pairs(
    mask: Tensor | None, rows: int, queries: int, keys: int, device: torch.device, shape: tuple[int, int]
) -> Tensor:
    """bool [R, queries or 1, keys], filled up with what nobody sees; one row and query where all are alike."""
    if mask is None:
        mask = torch.ones(1, 1, keys, dtype=torch.bool, device=device)
    pairs = mask[:, None] if mask.dim() == 2 else mask
    below = shape[0] - queries if pairs.shape[1] == queries and queries > 1 else 0
    return F.pad(pairs, (0, shape[1] - keys, 0, below))


def _create(content: list[Tensor], queries: int, keys: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    rule = BlockVisibility(*content).rule() if len(content) == 2 else _rule(content[0])
    return create_block_mask(rule, len(content[0]), None, queries, keys, device=str(device))


def _rule(pairs: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The mask as a function of the numbers of row, head, query and key."""
    each_row, each_query = (size > 1 for size in pairs.shape[:2])

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = batch if each_row else torch.zeros_like(batch)
        return pairs[row, query if each_query else torch.zeros_like(query), key]

    return seen


def _filled(part: Tensor, missing: int) -> Tensor:
    return F.pad(part, (0, 0, 0, missing)) if missing else part


@cache
def _flex_attention(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # Dynamic shapes failed to compile in torch 2.13; one graph a shape does not.
    return torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
