"""Attention over rows that lie behind each other without padding."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F


def attend_segments(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """Every token sees its own segment, in both directions.

    On a GPU in half precision through flash-attn where it is installed, otherwise through PyTorch's own variable-length
    kernel; elsewhere segments of one length go through scaled_dot_product_attention together.

    Args:
        q: float [1, H, T, D].
        k, v: float [1, G, T, D]; consecutive query heads share a key head.
        lengths: tokens of each segment, T in all.

    Returns:
        float [1, H, T, D].
    """
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16):
        return _on_gpu(q, k, v, lengths)
    starts = [0, *accumulate(lengths)]
    out = torch.empty_like(q)
    parts: list[Tensor] = []
    places: list[Tensor] = []
    share = q.shape[1] // k.shape[1]
    for size in sorted(set(lengths) - {0}):
        first = torch.tensor([start for start, length in zip(starts, lengths, strict=False) if length == size])
        columns = (first[:, None] + torch.arange(size)).to(q.device)
        query, key, value = (part[0][:, columns].transpose(0, 1) for part in (q, k, v))
        if share > 1:
            key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
        found = F.scaled_dot_product_attention(query, key, value)
        parts.append(found.transpose(0, 1).flatten(1, 2))
        places.append(columns.flatten())
    if not parts:
        return out
    order = torch.cat(places).argsort()
    return torch.cat(parts, 1)[:, order][None]


def _on_gpu(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=q.device)
    longest = max(lengths)
    query, key, value = (part[0].transpose(0, 1).contiguous() for part in (q, k, v))
    if importlib.util.find_spec("flash_attn") is not None:
        from flash_attn import flash_attn_varlen_func

        out = flash_attn_varlen_func(query, key, value, ends, ends, longest, longest)
    else:
        from torch.nn.attention.varlen import varlen_attn

        grouped = query.shape[1] != key.shape[1]
        out = varlen_attn(query, key, value, ends, ends, longest, longest, enable_gqa=grouped)
    return out.transpose(0, 1)[None]
