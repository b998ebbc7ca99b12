"""Building blocks that the model families share: normalisation, rotary positions, attention kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

AttentionKernel = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(q [B, H, L, D], k [B, G, S, D], v [B, G, S, D], key_mask bool [B, S] or None) -> float [B, H, L, D]."""


class Context(NamedTuple):
    """What all layers of one forward pass share.

    Attributes:
        cos, sin: rotary tables, float [L, R] or [B, 1, L, R]; the first R dimensions of a head are turned.
        key_mask: bool [B, S], True = the key exists; None where all do.
        kernel: computes the attention.
    """

    cos: Tensor
    sin: Tensor
    key_mask: Tensor | None
    kernel: AttentionKernel

    @classmethod
    def of(
        cls,
        ids: Tensor,
        attention_mask: Tensor | None,
        rotary_dim: int,
        theta: float,
        dtype: torch.dtype,
        attention: str,
    ) -> Context:
        """The context of ids [B, L] with a mask bool [B, L] over keys; `dtype` is that of the rotary tables."""
        key_mask = needed_key_mask(attention_mask)
        cos, sin = rotary_tables(token_positions(ids, key_mask), rotary_dim, theta, dtype)
        return cls(cos, sin, key_mask, attention_kernel(attention))


class AttentionName:
    """An attribute of a policy that holds the name of its attention kernel and takes no other name."""

    def __get__(self, policy: Any, owner: type | None = None) -> str:
        if policy is None:
            raise AttributeError("the attention backend belongs to a policy, not to its class")
        return policy.__dict__["_attention"]

    def __set__(self, policy: Any, name: str) -> None:
        attention_kernel(name)
        policy.__dict__["_attention"] = name


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


def token_positions(ids: Tensor, key_mask: Tensor | None) -> Tensor:
    """Positions counted over existing tokens: int64 [L], or [B, 1, L] where a mask says that some are missing.

    Rotary attention reads differences of positions alone, so where a row's tokens are contiguous this changes nothing
    but rounding: a padded row gets the same angles as alone, which matters in bfloat16.
    """
    if key_mask is None:
        return torch.arange(ids.shape[1], device=ids.device)
    return (key_mask.cumsum(-1) - 1).clamp_min(0)[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each head vector of x [B, H, L, D] by its position's angles, in the tables' dtype, and cast back.

    Tables narrower than the head turn its first dimensions and leave the others.
    """
    size = cos.shape[-1]
    turned = x[..., :size].to(cos.dtype)
    first, second = turned.chunk(2, -1)
    turned = (turned * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)
    return turned if size == x.shape[-1] else torch.cat([turned, x[..., size:]], -1)


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[B, L, H * D] -> [B, H, L, D]."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
    """Rotate queries and keys, attend, and join the heads.

    Args:
        q: [B, H, L, D].
        k, v: [B, G, L, D].

    Returns:
        float [B, L, H * D].
    """
    q, k = rotate(q, context.cos, context.sin), rotate(k, context.cos, context.sin)
    return context.kernel(q, k, v, context.key_mask).transpose(1, 2).flatten(2)


def run_layers(layers: Iterable[nn.Module], x: Tensor, context: Context, checkpointing: bool) -> Tensor:
    """Pass x [B, L, H] through the layers; `checkpointing` keeps only each one's input for the backward pass."""
    for layer in layers:
        if checkpointing and torch.is_grad_enabled():
            x = checkpoint(layer, x, context, use_reentrant=False)
        else:
            x = layer(x, context)
    return x


@torch.no_grad()
def fill_randomly(module: nn.Module, seed: int, residual: tuple[str, ...]) -> None:
    """Draw every weight from `seed` alone; the global generator is left alone.

    Matrices are normal with standard deviation 1/sqrt(fan in), norms 1, biases and buffers 0. The projections named
    in `residual`, which write to the residual stream, are divided by sqrt(2 (layer + 1)), so that depth does not
    inflate it; a projection outside the numbered layers is not.
    """
    stream = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        if name.endswith(".bias"):
            weight.zero_()
        elif weight.dim() == 1:
            weight.fill_(1.0)
        else:
            weight.normal_(std=weight.shape[-1] ** -0.5 * _residual_scale(name, residual), generator=stream)
    for buffer in module.buffers():
        buffer.zero_()


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


def _residual_scale(name: str, residual: tuple[str, ...]) -> float:
    *path, own = name.removesuffix(".weight").split(".")
    layer = next((int(part) for part in path if part.isdigit()), None)
    return (2 * (layer + 1)) ** -0.5 if own in residual and layer is not None else 1.0
