"""Completions that share their first denoising steps: values of nodes, advantages of segments, targets for siblings.

A batch holds the leaves; `node_index` [B, D] names the node at depth 1 to D that each belongs to, and leaves of one
group have their root in common. A segment leads from a node to a child; the first leaf below the child stands for it.
Nothing here may see part of a group.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Segments(NamedTuple):
    """The segments that end at depth 1 to D, seen from the leaves.

    Attributes:
        parent: int64 [B, D], number of the node where the segment starts, below B, in one count for each depth.
        leader: int64 [B, D], the leaf that stands for the segment.
    """

    parent: Tensor
    leader: Tensor

    @property
    def stands(self) -> Tensor:
        """bool [B, D], whether the leaf stands for the segment itself."""
        return self.leader == torch.arange(len(self.leader), device=self.leader.device)[:, None]


class Target(NamedTuple):
    """What siblings teach each other.

    Attributes:
        probs: float [B, D, L], the probability of the leaf's token under its parent's target; 0 where another sibling
            stands for the same token, or where the target does not ask for it.
        weight: float [B, D], children of the parent over the positions its target covers.
    """

    probs: Tensor
    weight: Tensor


def segments(node_index: Tensor, group_index: Tensor) -> Segments:
    """The segments of leaves [B] with these nodes [B, D] and groups [B]."""
    above = torch.cat([group_index[:, None], node_index[:, :-1]], 1)
    parents, leaders = [], []
    for parent, child in zip(above.unbind(1), node_index.unbind(1), strict=True):
        # Numbers of one depth may repeat those of another group's tree.
        _, ended = torch.unique(torch.stack([group_index, child], 1), dim=0, return_inverse=True)
        _, started = torch.unique(torch.stack([group_index, parent], 1), dim=0, return_inverse=True)
        leaf = torch.arange(len(child), device=child.device)
        first = torch.full_like(leaf, len(leaf)).scatter_reduce(0, ended, leaf, "amin")
        parents.append(started)
        leaders.append(first[ended])
    return Segments(torch.stack(parents, 1), torch.stack(leaders, 1))


def node_values(reward: Tensor, tree: Segments) -> Tensor:
    """Value of the node each segment ends in, float [B, D]: a leaf's reward, or the mean over a node's children.

    Args:
        reward: float [B], of the leaves.
    """
    values = [reward]
    for depth in range(tree.parent.shape[1] - 1, 0, -1):
        values.insert(0, _over_siblings(values[0], tree, depth) / _over_siblings(torch.ones_like(reward), tree, depth))
    return torch.stack(values, 1)


def sibling_advantages(values: Tensor, tree: Segments) -> Tensor:
    """Value of each segment's end minus the mean over its siblings, float [B, D]; 0 for an only child and for equals.

    Args:
        values: float [B, D], as `node_values`.

    Source: d-TreeRPO, arXiv:2512.09675.
    """
    found = []
    for depth, value in enumerate(values.unbind(1)):
        count = _over_siblings(torch.ones_like(value), tree, depth)
        others = (_over_siblings(value, tree, depth) - value) / (count - 1).clamp(min=1)
        # Whatever the rounding of their mean, equals teach nothing.
        lowest, highest = (_extreme(value, tree, depth, how) for how in ("amin", "amax"))
        found.append(torch.where(lowest < highest, value - others, 0.0))
    return torch.stack(found, 1)


def sibling_targets(advantage: Tensor, tokens: Tensor, active: Tensor, tree: Segments, temperature: float) -> Target:
    """At each position of a parent the tokens that its better children wrote, weighed by their advantage.

    Children with a positive advantage weigh softmax(A / temperature); at each position the weights of those that wrote
    there are normalised and put on the tokens they wrote.

    Args:
        advantage: float [B, D], of the segments.
        tokens: int64 [B, L].
        active: bool [B, D, L], what each segment wrote.
        temperature: above 0.

    Source: self-distillation of d-TreeRPO, arXiv:2512.09675, and its code, which adds 1e-8 to the normaliser.
    """
    probs = advantage.new_zeros(active.shape)
    weight = torch.zeros_like(advantage)
    for depth in range(advantage.shape[1]):
        better = tree.stands[:, depth] & (advantage[:, depth] > 0)
        for parent in tree.parent[better, depth].unique().tolist():
            children = tree.stands[:, depth] & (tree.parent[:, depth] == parent)
            teachers = (children & better).nonzero().flatten()
            wrote = active[teachers, depth]
            share = (advantage[teachers, depth] / temperature).softmax(0)[:, None] * wrote
            share = share / (share.sum(0) + 1e-8)
            same = (tokens[teachers][:, None] == tokens[teachers]) & wrote[:, None] & wrote
            # The first of those that wrote the same token stands for it.
            earlier = torch.ones(same.shape[:2], dtype=torch.bool, device=same.device).tril(-1)
            repeated = (same & earlier[..., None]).any(1)
            probs[teachers, depth] = (same * share).sum(1).masked_fill(repeated, 0.0)
            weight[teachers, depth] = float(children.sum()) / max(int(wrote.any(0).sum()), 1)
    return Target(probs, weight)


def divergence_from_target(probs: Tensor, log_probs: Tensor) -> Tensor:
    """KL(target, policy) as a sum over the tokens the target asks for, elementwise: q (log(q + 1e-8) - log p).

    Args:
        probs: float, q; 0 where nothing is asked.
        log_probs: float of the same shape, log p of the same tokens.
    """
    return torch.where(probs > 0, probs * ((probs + 1e-8).log() - log_probs), 0.0)


def distillation_weight(progress: float, highest: float, growth: float) -> float:
    """highest (e^(growth g) - 1) / (e^growth - 1) at the share g of a run that is done, in [0, 1]."""
    return highest * math.expm1(growth * progress) / math.expm1(growth)


def distillation_temperature(progress: float, highest: float, decay: float) -> float:
    """highest (1 - g)^decay, at least 1e-6."""
    return max(highest * (1 - progress) ** decay, 1e-6)


def _over_siblings(value: Tensor, tree: Segments, depth: int) -> Tensor:
    """Sum of `value` [B] over the segments with the same parent, each counted once; [B]."""
    parent = tree.parent[:, depth]
    counted = torch.where(tree.stands[:, depth], value, 0.0)
    return value.new_zeros(len(value)).index_add(0, parent, counted)[parent]


def _extreme(value: Tensor, tree: Segments, depth: int, how: str) -> Tensor:
    parent = tree.parent[:, depth]
    return torch.zeros_like(value).scatter_reduce(0, parent, value, how, include_self=False)[parent]
