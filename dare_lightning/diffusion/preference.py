"""Pairs of answers, one preferred, and the loss on the difference of their likelihoods."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Pairs(NamedTuple):
    """Attributes: int64 [P] each, the rows of a batch that hold the preferred and the other answer of a pair."""

    chosen: Tensor
    rejected: Tensor


def find_pairs(pair_index: Tensor | None, preference: Tensor | None) -> Pairs:
    """Who is compared with whom.

    Args:
        pair_index: int64 [B]; two rows with the same number are a pair.
        preference: float [B]; the row of a pair with the larger value is the preferred one.

    Raises:
        ValueError: the columns are missing, a row has no partner here, or a pair prefers neither answer.
    """
    if pair_index is None or preference is None:
        raise ValueError(
            "the batch has no pairs: group_index and reward must say which answers are compared and which one is"
            " preferred; use preference data (data=preference)"
        )
    order = pair_index.argsort(stable=True)
    numbers, sizes = pair_index.unique(return_counts=True)
    if bool((sizes != 2).any()):
        odd = {int(n): int(s) for n, s in zip(numbers, sizes, strict=True) if s != 2}
        raise ValueError(
            f"{len(pair_index)} answers are not whole pairs: {dict(list(odd.items())[:8])} (pair: answers); both"
            " answers of a pair must be in one micro-batch"
        )
    first, second = order.view(-1, 2).unbind(1)
    difference = preference[first] - preference[second]
    if bool((difference == 0).any()):
        tied = pair_index[first][difference == 0].tolist()
        raise ValueError(f"pairs {tied[:8]} prefer neither of their answers; leave them out")
    swapped = difference < 0
    return Pairs(torch.where(swapped, second, first), torch.where(swapped, first, second))


def margins(log_likelihood: Tensor, ref: Tensor, pairs: Pairs) -> Tensor:
    """s = [B(y_w) - B_ref(y_w)] - [B(y_l) - B_ref(y_l)], float [P].

    Args:
        log_likelihood, ref: float [B] or [B, N]. Rows are subtracted before they are averaged: the policy and the
            reference read the same masks, so their differences are small where the values are not.
    """
    difference = log_likelihood - ref.detach()
    if difference.ndim == 2:
        difference = difference.mean(-1)
    return difference[pairs.chosen] - difference[pairs.rejected]


def dpo_loss(margin: Tensor, beta: float) -> Tensor:
    """-log sigmoid(beta s), elementwise. Source: DPO, arXiv:2305.18290 equation 7."""
    return -torch.nn.functional.logsigmoid(beta * margin)
