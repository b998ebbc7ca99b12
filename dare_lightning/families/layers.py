"""Building blocks that the model families share: normalisation, rotary positions, random weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last axis, statistics in float32 at least.

    The result returns to the input's dtype before the weight multiplies it; the other order differs in bfloat16.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(at_least_float32(x.dtype))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


def rotary_tables(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, each [..., L, head_dim] for positions [..., L].

    They are computed from the config at every forward pass: a buffer would have to be filled by the loader, and
    one made in inference mode could not be used in training. Angles are float32, float64 where `dtype` is.

    Source: Su et al. 2021, arXiv:2104.09864, equation 34, half-split layout (the angles repeat as [f, f]).
    """
    wide = at_least_float32(dtype)
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=wide) / head_dim
    angles = positions.to(wide)[..., None] * theta**-exponents
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


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


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype, or float32 where it is narrower."""
    return torch.promote_types(dtype, torch.float32)


def _residual_scale(name: str, residual: tuple[str, ...]) -> float:
    *path, own = name.removesuffix(".weight").split(".")
    layer = next((int(part) for part in path if part.isdigit()), None)
    return (2 * (layer + 1)) ** -0.5 if own in residual and layer is not None else 1.0
