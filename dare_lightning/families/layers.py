"""Building blocks that the model families share: normalisation, rotary positions, attention kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

AttentionKernel = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(q [B, H, L, D], k [B, G, S, D], v [B, G, S, D], key_mask bool [B, S] or None) -> float [B, H, L, D]."""


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last axis, statistics in float32 at least.

    The result returns to the input's dtype before the weight multiplies it; the other order differs in bfloat16.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(_wide(x.dtype))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


def rotary_tables(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, each [..., L, head_dim] for positions [..., L].

    They are computed from the config at every forward pass: a buffer would have to be filled by the loader, and
    one made in inference mode could not be used in training. Angles are float32, float64 where `dtype` is.

    Source: Su et al. 2021, arXiv:2104.09864, equation 34, half-split layout (the angles repeat as [f, f]).
    """
    wide = _wide(dtype)
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=wide) / head_dim
    angles = positions.to(wide)[..., None] * theta**-exponents
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each head vector of x [B, H, L, D] by its position's angles, in the tables' dtype, and cast back."""
    turned = x.to(cos.dtype)
    first, second = turned.chunk(2, -1)
    return (turned * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


def eager(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """Attention written out, softmax in float32 at least. Slow and plain: the yardstick for the other kernels."""
    k, v = _repeat_groups(q, k, v)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if key_mask is not None:
        scores = scores + _additive(key_mask, scores.dtype)
    return scores.softmax(-1, dtype=_wide(scores.dtype)).to(v.dtype) @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """PyTorch's scaled_dot_product_attention, which picks a fused kernel where one fits."""
    k, v = _repeat_groups(q, k, v)
    bias = None if key_mask is None else _additive(key_mask, q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


ATTENTION_KERNELS: dict[str, AttentionKernel] = {"eager": eager, "sdpa": sdpa}


def attention_kernel(name: str) -> AttentionKernel:
    """The kernel of this name.

    Raises:
        ValueError: there is none.
    """
    if name not in ATTENTION_KERNELS:
        raise ValueError(f"attention={name!r} is not a kernel here; choose one of {', '.join(ATTENTION_KERNELS)}")
    return ATTENTION_KERNELS[name]


def needed_key_mask(attention_mask: Tensor | None) -> Tensor | None:
    """The mask, or None where every token exists: the fastest fused kernels take no mask."""
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask.bool()


def _repeat_groups(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Give each query head its key/value head: query head h reads head h // (H / G)."""
    share = q.shape[1] // k.shape[1]
    if share == 1:
        return k, v
    return k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)


def _additive(key_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a key counts, the lowest finite number elsewhere: a row without any key gives no NaN."""
    bias = torch.zeros(key_mask.shape, dtype=dtype, device=key_mask.device)
    return bias.masked_fill(~key_mask, torch.finfo(dtype).min)[:, None, None, :]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
