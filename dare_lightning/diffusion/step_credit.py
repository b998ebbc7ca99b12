"""Credit for single denoising steps, from the reward that each step's proposals would have earned as the answer."""

from __future__ import annotations

import torch
from torch import Tensor


def held_rewards(rewards: Tensor, passes: Tensor, steps: int) -> Tensor:
    """Rewards of `steps` steps, float [B, K], where a finished completion keeps the reward of its last pass.

    Args:
        rewards: float [B, T], what stands after a row's last pass means nothing.
        passes: int64 [B], forward passes each row made; at least 1.
        steps: K, at least the most passes of any row.
    """
    last = (passes.clamp(max=rewards.shape[1]) - 1)[:, None]
    return rewards.gather(1, torch.arange(steps, device=rewards.device)[None].clamp(max=last))


def step_scores(rewards: Tensor) -> Tensor:
    """(R_s - R_{s-1} + 1) + mean of the rewards of later steps, float [B, K].

    Before the first step R is 0, and after the last step the mean is that step's own reward.

    Args:
        rewards: float [B, K].

    Source: MDPO, arXiv:2508.13148, and its code.
    """
    steps = rewards.shape[1]
    gain = torch.diff(rewards, dim=1, prepend=torch.zeros_like(rewards[:, :1])) + 1
    later = rewards.flip(1).cumsum(1).flip(1) - rewards
    left = torch.arange(steps - 1, -1, -1, device=rewards.device)
    future = torch.where(left > 0, later / left.clamp(min=1), rewards)
    return gain + future


def strongest_steps(strength: Tensor, most: int) -> Tensor:
    """The `most` steps of greatest strength [K], in ascending order; the earlier of equals first."""
    order = strength.argsort(descending=True, stable=True)
    return order[:most].sort().values
