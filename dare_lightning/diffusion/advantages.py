"""Group-relative advantages: what a completion earned beyond the others that answer the same prompt.

Each estimator maps rewards [prompts, group] to advantages of that shape. A group whose rewards are all equal gets
exactly 0, whatever the rounding of its mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Estimator = Callable[[Tensor], Tensor]


def grpo(rewards: Tensor, eps: float = 1e-6) -> Tensor:
    """(r - mean) / (s + eps), s the sample standard deviation (ddof 1). Source: verl; eps 1e-4 in JustGRPO."""
    rewards = _groups(rewards)
    return _varied(rewards, _centred(rewards) / (rewards.std(1, keepdim=True) + eps))


def grpo_1e4(rewards: Tensor) -> Tensor:
    """`grpo` with eps 1e-4. Source: JustGRPO; MDPO for each denoising step."""
    return grpo(rewards, eps=1e-4)


def no_std(rewards: Tensor) -> Tensor:
    """r - mean. Source: Dr.GRPO; d1, arXiv:2504.12216."""
    rewards = _groups(rewards)
    return _varied(rewards, _centred(rewards))


def leave_one_out(rewards: Tensor) -> Tensor:
    """r - mean of the others = (r - mean) G / (G - 1). Source: DiffuCoder, arXiv:2506.20639."""
    rewards = _groups(rewards)
    size = rewards.shape[1]
    return _varied(rewards, _centred(rewards) * (size / (size - 1)))


def leave_one_out_std(rewards: Tensor, eps: float = 1e-4) -> Tensor:
    """`leave_one_out` divided by (s + eps), s with ddof 1. Source: DiffuCoder with scaled rewards."""
    rewards = _groups(rewards)
    return leave_one_out(rewards) / (rewards.std(1, keepdim=True) + eps)


def z_score(rewards: Tensor) -> Tensor:
    """(r - mean) / s, s the population standard deviation (ddof 0). Source: TraceRL, DiRL."""
    rewards = _groups(rewards)
    spread = rewards.std(1, keepdim=True, correction=0)
    return _varied(rewards, _centred(rewards) / torch.where(spread > 0, spread, 1.0))


ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo,
    "grpo_1e4": grpo_1e4,
    "no_std": no_std,
    "leave_one_out": leave_one_out,
    "leave_one_out_std": leave_one_out_std,
    "z_score": z_score,
}


def estimator(name: str) -> Estimator:
    """The advantage estimator of this name.

    Raises:
        ValueError: no such estimator.
    """
    if name not in ESTIMATORS:
        raise ValueError(f"advantage estimator {name!r} does not exist; choose one of {', '.join(ESTIMATORS)}")
    return ESTIMATORS[name]


class GroupAdvantages(NamedTuple):
    """Advantages of a flat batch.

    Attributes:
        advantage: float [B], in the order of the rewards.
        groups: how many groups there are.
        zero_variance: how many of them have all rewards equal (advantage 0: nothing to learn from).
    """

    advantage: Tensor
    groups: int
    zero_variance: int


def group_advantages(rewards: Tensor, group_index: Tensor, estimate: Estimator) -> GroupAdvantages:
    """Advantages of completions in any order: rows with the same group number belong together.

    Args:
        rewards: float [B].
        group_index: int64 [B].
        estimate: maps [prompts, group] to the same shape; a method's `advantages` hook or an estimator of this file.

    Raises:
        ValueError: groups of different sizes, a group of one, or a reward that is not finite.
    """
    if not bool(torch.isfinite(rewards).all()):
        bad = (~torch.isfinite(rewards)).nonzero().flatten().tolist()
        raise ValueError(f"rewards of samples {bad[:8]} are not finite; a verifier must return a number")
    numbers, position, sizes = group_index.unique(return_inverse=True, return_counts=True)
    size = int(sizes.max())
    if not bool((sizes == size).all()):
        odd = {int(n): int(s) for n, s in zip(numbers, sizes, strict=True) if s != size}
        total, below = len(rewards), len(rewards) // size * size
        raise ValueError(
            f"{total} completions do not form whole groups of {size}: groups {odd} (number: completions) are smaller; "
            f"the nearest whole batches have {below} and {below + size} completions"
        )
    order = position.argsort(stable=True)
    grouped = rewards[order].view(-1, size)
    advantage = torch.empty_like(rewards)
    advantage[order] = estimate(grouped).flatten().to(advantage.dtype)
    return GroupAdvantages(advantage, len(numbers), int(_equal(grouped).sum()))


def group_means(values: Tensor, group_index: Tensor) -> Tensor:
    """For each completion the mean of its group, float64 [B].

    Args:
        values: [B].
        group_index: int64 [B].
    """
    _, position, sizes = group_index.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(sizes), dtype=torch.float64, device=values.device).index_add(0, position, values.double())
    return (sums / sizes)[position]


def _groups(rewards: Tensor) -> Tensor:
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(
            f"rewards of shape {list(rewards.shape)} are not [prompts, group] with a group of at least 2; a completion "
            "is compared with the others of its prompt, so raise group_size"
        )
    return rewards


def _centred(rewards: Tensor) -> Tensor:
    return rewards - rewards.mean(1, keepdim=True)


def _equal(rewards: Tensor) -> Tensor:
    return rewards.amax(1) == rewards.amin(1)


def _varied(rewards: Tensor, advantages: Tensor) -> Tensor:
    return torch.where(_equal(rewards)[:, None], 0.0, advantages)
