"""What ranks tell each other. Every function is the identity in a single process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed


def _active() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the number of processes."""
    if not _active():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def sum_over_ranks(value: Tensor, device: torch.device) -> Tensor:
    """Elementwise sum of `value` over all ranks, on the device `value` came from. Every rank must call it."""
    if not _active():
        return value
    total = value.to(device, copy=True)
    distributed.all_reduce(total)
    return total.to(value.device)


def gather_objects(value: Any) -> list[Any]:
    """Everybody's `value`, by rank. Every rank must call it."""
    if not _active():
        return [value]
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, value)
    return gathered
