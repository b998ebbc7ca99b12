"""What a value model is for: advantages and targets step by step of a rollout's trace, and the loss that teaches it.

The unit of time is a step of the trace, which writes several tokens at once: its reward and its value are the means of
theirs. A token then differs from the others of its step by its own reward and value alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class StepReturns(NamedTuple):
    """Attributes: the advantage of each token and the return its value should predict, float [B, L]; 0 elsewhere."""

    advantage: Tensor
    target: Tensor


def outcome_rewards(reward: Tensor, step: Tensor) -> Tensor:
    """The reward of each answer, paid to the tokens of its last step: float [B, L].

    Args:
        reward: float [B].
        step: int64 [B, L], the step that wrote each token that counts; -1 elsewhere.
    """
    last = step.amax(1, keepdim=True)
    return torch.where((step >= 0) & (step == last), reward[:, None], 0.0)


def step_returns(rewards: Tensor, values: Tensor, step: Tensor, gamma: float, decay: float) -> StepReturns:
    """Generalised advantage estimation over the steps of a trace.

    With r*, V* the means of a step's rewards and values, delta_i = r*_i - V*_i + gamma V*_{i+1} and
    A*_i = delta_i + gamma decay A*_{i+1}; token j of step i has A_j = r_j - V_j + gamma V*_{i+1} + gamma decay A*_{i+1}
    and the target R_j = r_j + gamma R*_{i+1}, R* being the discounted sum of later r*.

    Args:
        rewards, values: float [B, L].
        step: int64 [B, L], each sample's steps numbered 0, 1, 2, ... without gaps; -1 where a token does not count.
        gamma: discount of a step, in [0, 1].
        decay: lambda, in [0, 1]; with gamma = decay = 1 the advantage is the return minus the value.

    Source: Schulman et al. 2016, arXiv:1506.02438, over the trace steps of TraceRL, arXiv:2509.06949.
    """
    counted = step >= 0
    steps = int(step.max()) + 1 if step.numel() else 0
    place = step.clamp(min=0)
    if steps < 1:
        nothing = torch.zeros_like(rewards)
        return StepReturns(nothing, nothing)

    def mean(column: Tensor) -> Tensor:
        """[B, L] -> [B, T + 1]: the mean of each step, 0 after the last."""
        sums = column.new_zeros(len(column), steps + 1).scatter_add(1, place, torch.where(counted, column, 0.0))
        counts = column.new_zeros(len(column), steps + 1).scatter_add(1, place, counted.to(column))
        return sums / counts.clamp(min=1)

    reward, value = mean(rewards), mean(values)
    advantage, target = torch.zeros_like(reward), torch.zeros_like(reward)
    for i in range(steps - 1, -1, -1):
        delta = reward[:, i] - value[:, i] + gamma * value[:, i + 1]
        advantage[:, i] = delta + gamma * decay * advantage[:, i + 1]
        target[:, i] = reward[:, i] + gamma * target[:, i + 1]
    later = [column.gather(1, place + 1) for column in (value, advantage, target)]
    own = rewards - values + gamma * later[0] + gamma * decay * later[1]
    return StepReturns(torch.where(counted, own, 0.0), torch.where(counted, rewards + gamma * later[2], 0.0))


def clipped_value_loss(values: Tensor, old_values: Tensor, target: Tensor, clip: float | None) -> Tensor:
    """Half the squared error of each token's value; a value that left old +- clip is never judged more mildly.

    Args:
        values, old_values, target: float, of one shape.
        clip: range around the old value, above 0; None for no range.

    Source: PPO's value clipping, arXiv:1707.06347, as in TraceRL's code.
    """
    error = (values - target).square()
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (near - target).square())
    return error / 2
