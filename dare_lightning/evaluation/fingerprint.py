"""Which weights these are, without copying them off the device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dare_lightning.families.base import PolicyModel

_PIECE = 1 << 22


@torch.no_grad()
def weights_fingerprint(policy: PolicyModel) -> str:
    """A hash of every parameter's name, shape, dtype and bits; equal exactly where the weights are, in practice.

    Two integer sums of each tensor's bytes, one of them weighted by place, are taken on its device; only those are
    hashed. Not meant against forgery.
    """
    return _fingerprint(sorted(policy.named_parameters()))


@torch.no_grad()
def adapter_fingerprint(policy: PolicyModel) -> str | None:
    """The same of the adapter's parameters alone; None where the policy has none."""
    adapter = [(name, parameter) for name, parameter in sorted(policy.named_parameters()) if ".lora_" in name]
    return _fingerprint(adapter) if adapter else None


def _fingerprint(parameters: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, parameter in parameters:
        sums = _sums(_whole(parameter))
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {sums}\n".encode())
    return digest.hexdigest()


def _whole(parameter: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    # Collective where weights are sharded: every rank must take the fingerprint.
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def _sums(tensor: Tensor) -> tuple[int, int]:
    flat: Any = tensor.contiguous().view(-1).view(torch.uint8)
    words = flat.view(torch.int16) if flat.numel() % 2 == 0 else flat
    total = weighted = 0
    for number, piece in enumerate(words.split(_PIECE)):
        values = piece.to(torch.int64)
        places = torch.arange(1, len(values) + 1, device=values.device)
        total += int(values.sum())
        weighted += (number + 1) * int((values * places).sum())
    return total, weighted
