"""Random streams: every draw belongs to a sample and says what it is for."""

from __future__ import annotations

import torch

_MASK = (1 << 64) - 1


def derive_seed(seed: int, *salt: int) -> int:
    """Mix `seed` with any number of integers into a new seed in [0, 2**63).

    Nearby inputs give unrelated outputs (a splitmix64 round an input), so streams derived from
    (seed, step, sample, row) are independent whatever the batch, accumulation or number of ranks.
    """
    state = seed & _MASK
    for value in (0, *salt):
        state = (state + (value & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def generator(seed: int, *salt: int) -> torch.Generator:
    """A CPU generator for the stream (seed, *salt). The global generator is never touched."""
    return torch.Generator().manual_seed(derive_seed(seed, *salt))
