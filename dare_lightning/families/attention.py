"""Attention: its kernels, which keys a token sees, caches of keys and values, and rows without padding.

A family hands its embedding, layers and last norm to `run_stack`; how they are read is decided here and is the same
for all families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dare_lightning.families.cost import count_pass, is_counting
from dare_lightning.families.flex import Flex
from dare_lightning.families.layers import at_least_float32, rotary_tables, rotate
from dare_lightning.families.varlen import attend_segments
from dare_lightning.families.visibility import BlockVisibility, Trimmed

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q [B, H, L, D], k [B, G, S, D], v [B, G, S, D]) -> float [B, H, L, D]; what is visible is bound to it."""


class KeyValueCache:
    """Rotated keys and values of every layer for R rows of S columns; memory is taken when the first pass writes.

    Args:
        rows, columns: R and S.
    """

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def write(self, layer: int, rows: Tensor, columns: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [B, G, L, D] of these rows [B] at these columns [B, L]."""
        if layer == len(self._keys):
            shape = (self.rows, self.columns, keys.shape[1], keys.shape[3])
            self._keys.append(keys.new_zeros(shape))
            self._values.append(values.new_zeros(shape))
        self._keys[layer][rows[:, None], columns] = keys.transpose(1, 2)
        self._values[layer][rows[:, None], columns] = values.transpose(1, 2)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Rows `target` int64 [n] hold what rows `source` int64 [n] hold, in every layer."""
        for store in (*self._keys, *self._values):
            store[target] = store[source]

    def read(self, layer: int, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys and values [B, G, S, D] of these rows, None for all in order; 0 where nothing was written."""
        picked = [store if rows is None else store[rows] for store in (self._keys[layer], self._values[layer])]
        return picked[0].transpose(1, 2), picked[1].transpose(1, 2)


@dataclass(frozen=True)
class View:
    """How a pass reads a sequence where it is not simply every token and each of them every other.

    Attributes:
        positions: int64 [B, L], the place of each token in its sequence, for the rotary angles.
        visible: bool [B, L, S] or [B, 1, S], the keys each token sees, or a rule over blocks; None for all.
        cache: keys and values of the S columns; this pass writes its own into it and then reads all. None where the
            keys are those of the tokens read.
        rows: int64 [B], the cache's row of each; needed with a cache.
        columns: int64 [B, L], the cache's column of each token; needed with a cache.
    """

    positions: Tensor
    visible: Tensor | BlockVisibility | None = None
    cache: KeyValueCache | None = None
    rows: Tensor | None = None
    columns: Tensor | None = None

    def exists(self) -> Tensor | None:
        """Which of the tokens read are there, bool [B, L], None for all; a token that is there sees itself."""
        if self.visible is None:
            return None
        if isinstance(self.visible, BlockVisibility):
            return self.visible.block >= 0
        if self.visible.shape[1] != 1:
            own = torch.arange(self.positions.shape[1], device=self.positions.device).expand_as(self.positions)
            return self.visible.gather(2, (own if self.columns is None else self.columns)[..., None]).squeeze(-1)
        return self.visible[:, 0] if self.columns is None else self.visible[:, 0].gather(1, self.columns)

    @cached_property
    def _picked(self) -> Tensor | None:
        """`rows`, or None where they are all of the cache's in order: found once a pass, not in every layer."""
        assert self.rows is not None
        assert self.cache is not None
        every = torch.arange(self.cache.rows, device=self.rows.device)
        return None if torch.equal(self.rows, every) else self.rows

    def keys(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values to attend to, given this pass's own."""
        if self.cache is None:
            return k, v
        assert self.rows is not None  # with a cache
        assert self.columns is not None
        self.cache.write(layer, self.rows, self.columns, k, v)
        # A pass over the whole canvas has everything at hand.
        return (k, v) if k.shape[2] == self.cache.columns else self.cache.read(layer, self._picked)


class Context(NamedTuple):
    """What all layers of one forward pass share, and the number of the layer at work.

    Attributes:
        cos, sin: rotary tables, float [L, R] or [B, 1, L, R]; the first R dimensions of a head are turned.
        kernel: computes the attention.
        view: see `View`; None for plain sequences.
        layer: counted from 0.
    """

    cos: Tensor
    sin: Tensor
    kernel: Kernel
    view: View | None = None
    layer: int = 0


class AttentionName:
    """An attribute of a policy that holds the name of its attention kernel and takes no other name."""

    def __get__(self, policy: Any, owner: type | None = None) -> str:
        if policy is None:
            raise AttributeError("the attention backend belongs to a policy, not to its class")
        return policy.__dict__["_attention"]

    def __set__(self, policy: Any, name: str) -> None:
        check_attention(name)
        policy.__dict__["_attention"] = name


@dataclass(frozen=True)
class Rotary:
    """Rotary positions of a stack.

    Attributes:
        size: how many dimensions of a head are turned.
        theta: base of the angles.
        wide: rotate in float32 at least; otherwise in the activations' dtype.
    """

    size: int
    theta: float
    wide: bool = False

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions [...]: each [..., size]."""
        return rotary_tables(positions, self.size, self.theta, at_least_float32(dtype) if self.wide else dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
    """Rotate queries and keys, attend, and join the heads.

    Args:
        q: [B, H, L, D].
        k, v: [B, G, L, D].

    Returns:
        float [B, L, H * D].
    """
    # Under autocast a norm of queries and keys leaves them in float32, beside values in half precision.
    q, k = (rotate(part, context.cos, context.sin).to(v.dtype) for part in (q, k))
    if context.view is not None:
        k, v = context.view.keys(context.layer, k, v)
    return context.kernel(q, k, v).transpose(1, 2).flatten(2)


def run_stack(
    ids: Tensor,
    attention_mask: Tensor | None,
    view: View | None,
    *,
    embed: Callable[[Tensor], Tensor],
    layers: Iterable[nn.Module],
    norm: nn.Module,
    rotary: Rotary,
    attention: str,
    checkpointing: bool,
) -> Tensor:
    """Final hidden states [B, L, H] of ids [B, L].

    Args:
        attention_mask: bool [B, L] over keys; None where all exist. Not read where there is a view.
        view: None for plain sequences.
        checkpointing: keep only each layer's input for the backward pass.
    """
    key_mask = None if view is not None else needed_key_mask(attention_mask)
    if is_counting():
        count_pass(ids, key_mask if view is None else view.exists())
    packing = Packing.of(key_mask) if key_mask is not None and attention == PACKED else None
    x = embed(ids if packing is None else packing.pack(ids))
    if packing is not None:
        positions, kernel = packing.positions, packing.kernel()
    elif view is not None:
        positions, kernel = view.positions[:, None], bound_kernel(attention, view.visible)
    else:
        positions, kernel = token_positions(ids, key_mask), bound_kernel(attention, key_mask)
    context = Context(*rotary.tables(positions, x.dtype), kernel, view)
    for number, layer in enumerate(layers):
        here = context._replace(layer=number)
        if checkpointing and torch.is_grad_enabled():
            x = checkpoint(layer, x, here, use_reentrant=False)
        else:
            x = layer(x, here)
    x = norm(x)
    return x if packing is None else packing.unpack(x)


@dataclass(frozen=True)
class Packing:
    """Rows of different lengths as one row without padding.

    Attributes:
        exists: bool [B, L].
        lengths: tokens of each row, 0 where it has none.
        positions: int64 [T], counted anew in each row.
    """

    exists: Tensor
    lengths: tuple[int, ...]
    positions: Tensor

    @classmethod
    def of(cls, exists: Tensor) -> Packing:
        """The packing of the tokens that exist, bool [B, L]."""
        return cls(exists, tuple(exists.sum(1).tolist()), (exists.cumsum(1) - 1)[exists])

    def pack(self, ids: Tensor) -> Tensor:
        """[B, L] -> [1, T]."""
        return ids[self.exists][None]

    def unpack(self, hidden: Tensor) -> Tensor:
        """[1, T, H] -> [B, L, H]; 0 where there is no token."""
        spread = hidden.new_zeros(*self.exists.shape, hidden.shape[-1])
        return spread.masked_scatter(self.exists[..., None], hidden)

    def kernel(self) -> Kernel:
        """Attention inside each row alone."""
        return partial(attend_segments, lengths=self.lengths)


# --- kernels ---------------------------------------------------------------------------------------------------------

PACKED = "varlen"


class _Masked:
    """A kernel under a mask that becomes an additive bias once, not in every layer."""

    def __init__(self, compute: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor], mask: Tensor | None) -> None:
        self._compute, self._mask = compute, mask
        self._bias: Tensor | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._mask is not None and (self._bias is None or self._bias.dtype != q.dtype):
            self._bias = _additive(self._mask, q.dtype)
        return self._compute(q, k, v, self._bias)


def eager(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Attention written out, softmax in float32 at least. Slow and plain: the yardstick for the other kernels."""
    k, v = repeat_groups(q, k, v)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    return scores.softmax(-1, dtype=at_least_float32(scores.dtype)).to(v.dtype) @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """PyTorch's scaled_dot_product_attention, which picks a fused kernel where one fits."""
    if q.shape[1] != k.shape[1] and (bias is None or bias.shape[2] == 1):
        # All queries see the same keys, so the heads that share them can follow each other: nothing is repeated.
        folded = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
        return F.scaled_dot_product_attention(folded, k, v, attn_mask=bias).reshape(q.shape)
    k, v = repeat_groups(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


KERNELS: dict[str, Callable[[Tensor | None], Kernel]] = {
    "eager": partial(_Masked, eager),
    "sdpa": partial(_Masked, sdpa),
    "flex": Flex,
    # Packed rows need no mask; what is not packed (a view, equal lengths) goes through the fused kernel.
    PACKED: partial(_Masked, sdpa),
}


def check_attention(name: str) -> None:
    """Raise ValueError where there is no kernel of this name."""
    if name not in KERNELS:
        raise ValueError(f"attention={name!r} is not a kernel here; choose one of {', '.join(KERNELS)}")


def bound_kernel(name: str, mask: Tensor | BlockVisibility | None) -> Kernel:
    """The kernel of this name under a mask.

    Args:
        mask: bool [B, S] over keys, or [B, L, S] or [B, 1, S] for each query, or a rule over blocks; None where all
            are visible.

    Raises:
        ValueError: there is no such kernel.
    """
    check_attention(name)
    if not isinstance(mask, BlockVisibility):
        return KERNELS[name](mask)
    if name == "eager":
        return KERNELS[name](mask.pairs())
    return Flex(mask) if name == "flex" else Trimmed(sdpa, mask, _additive)


def needed_key_mask(attention_mask: Tensor | None) -> Tensor | None:
    """The mask, or None where every token exists: the fastest fused kernels take no mask."""
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask.bool()


def token_positions(ids: Tensor, key_mask: Tensor | None) -> Tensor:
    """Positions counted over existing tokens: int64 [L], or [B, 1, L] where a mask says that some are missing.

    Rotary attention reads differences of positions alone, so where a row's tokens are contiguous this changes nothing
    but rounding: a padded row gets the same angles as alone, which matters in bfloat16.
    """
    if key_mask is None:
        return torch.arange(ids.shape[1], device=ids.device)
    return (key_mask.cumsum(-1) - 1).clamp_min(0)[:, None]


def repeat_groups(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Give each query head its key/value head: query head h reads head h // (H / G)."""
    share = q.shape[1] // k.shape[1]
    if share == 1:
        return k, v
    return k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a key counts, the lowest finite number elsewhere: a row without any key gives no NaN."""
    pairs = mask[:, None] if mask.dim() == 2 else mask
    bias = torch.zeros(pairs.shape, dtype=dtype, device=mask.device)
    return bias.masked_fill(~pairs, torch.finfo(dtype).min)[:, None]
