"""Completions that grow as a tree: those below one node are one completion until the node branches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from dare_lightning.generation.canvas import Canvas
from dare_lightning.generation.history import History
from dare_lightning.generation.layout import Layout
from dare_lightning.generation.schedule import Place, StepPolicy


@dataclass(frozen=True)
class Tree:
    """Trees over B rows, the leaves of one next to each other.

    Attributes:
        levels: children of the root, then of every node at depth 1, and so on.
        steps: planned steps of a completion, a multiple of the number of levels: nodes at depth d branch at step
            d · steps / levels.
    """

    levels: tuple[int, ...]
    steps: int

    @property
    def leaves(self) -> int:
        """Completions of one tree."""
        return math.prod(self.levels)

    def below(self, depth: int) -> int:
        """Leaves below a node at this depth."""
        return math.prod(self.levels[depth:])

    def node_index(self, count: int) -> Tensor:
        """Node of each of `count` completions at depth 1 to D, int64 [count, D]."""
        rows = torch.arange(count)
        return torch.stack([rows // self.below(depth) for depth in range(1, len(self.levels) + 1)], 1)

    def roots(self, count: int, device: torch.device) -> Tensor:
        """The first leaf of every node at depth 1: the rows that start."""
        return torch.arange(0, count, self.below(1), device=device)


class Growth:
    """Lets the trees of one batch grow while it is denoised.

    A node is run as its first leaf. When it branches, that row is copied to the first leaf of each of its children.
    From then on each draws from its own stream, of which nothing was taken before.
    """

    def __init__(self, tree: Tree, canvas: Canvas, history: History | None) -> None:
        self._tree = tree
        self._canvas = canvas
        self._history = history
        self._depth = torch.ones(canvas.ids.shape[0], dtype=torch.int64, device=canvas.ids.device)

    def start(self) -> Tensor:
        """The rows that are run from the beginning."""
        return self._tree.roots(self._canvas.ids.shape[0], self._canvas.ids.device)

    def branch(self, rows: Tensor) -> Tensor:
        """These rows, and those that split off them at the step they stand at."""
        tree = self._tree
        for depth in range(1, len(tree.levels)):
            place = self._canvas.place(rows)
            due = place.first_step + place.step >= depth * tree.steps // len(tree.levels)
            parents = rows[due & (self._depth[rows] == depth)]
            if len(parents) == 0:
                continue
            offsets = torch.arange(tree.levels[depth], device=rows.device) * tree.below(depth + 1)
            children = parents[:, None] + offsets
            self._copy(parents.repeat_interleave(len(offsets) - 1), children[:, 1:].flatten())
            self._depth[children.flatten()] = depth + 1
            rows = torch.cat([rows, children[:, 1:].flatten()]).sort().values
        return rows

    def finish(self) -> None:
        """Give nodes that were finished before they branched to all their leaves."""
        tree = self._tree
        for depth in range(1, len(tree.levels)):
            below = tree.below(depth)
            leaders = torch.arange(0, len(self._depth), below, device=self._depth.device)
            ended = leaders[self._depth[leaders] == depth]
            others = ended[:, None] + torch.arange(1, below, device=ended.device)
            self._copy(ended.repeat_interleave(below - 1), others.flatten())
            self._depth[others.flatten()] = len(tree.levels)

    def _copy(self, source: Tensor, target: Tensor) -> None:
        self._canvas.copy(source, target)
        if self._history is not None:
            self._history.copy(source, target)


def check_tree(levels: Sequence[int], layout: Layout, policy: StepPolicy) -> Tree:
    """The tree of these settings.

    Raises:
        ValueError: no level, one without children, steps that are not a multiple of the levels, or steps that are not
            one forward pass each, so that the passes that wrote the tokens do not tell where nodes branch.
    """
    found, steps, name = tuple(levels), layout.steps, type(policy).__name__
    if not found or any(children < 1 for children in found):
        raise ValueError(f"tree={list(found)} must name the children at each level, at least one each, such as [4, 4]")
    if not policy.planned or policy.compares_probabilities or policy.needs_random_order:
        raise ValueError(
            f"a tree branches at a share of the planned steps, and {name} does not keep to a plan; use the even "
            "schedule"
        )
    if steps % len(found):
        below = steps - steps % len(found)
        raise ValueError(
            f"steps={steps} is not a multiple of the {len(found)} levels of tree={list(found)}; "
            f"{below + len(found)} would be"
        )
    if not _every_step_commits(layout, policy):
        raise ValueError(
            f"a tree needs a forward pass for each of its steps={steps}, and {name} has steps here that commit "
            "nothing; use the even schedule with at most as many steps as tokens"
        )
    return Tree(found, steps)


def _every_step_commits(layout: Layout, policy: StepPolicy) -> bool:
    """Whether each planned step of each block writes something, and the last what is left."""
    for block, (start, end) in enumerate(pairwise(layout.bounds)):
        first, after = layout.first_steps[block : block + 2]
        open_ = torch.ones(1, end - start, dtype=torch.bool)
        for step in range(after - first):
            place = Place(*(torch.tensor([value]) for value in (end - start, step, after - first, first)))
            chosen = policy.select(torch.zeros(open_.shape), open_, place)
            if not bool(chosen.any()):
                return False
            open_ = open_ & ~chosen
        if bool(open_.any()):
            return False
    return True


def check_groups(tree: Tree, prompts: Sequence[Sequence[int]]) -> None:
    """Every tree has one prompt.

    Raises:
        ValueError: prompts that do not come in groups of equal ones, as many as there are leaves.
    """
    leaves = tree.leaves
    groups = [prompts[start : start + leaves] for start in range(0, len(prompts), leaves)]
    if len(prompts) % leaves or any(list(prompt) != list(group[0]) for group in groups for prompt in group):
        raise ValueError(
            f"tree={list(tree.levels)} has {leaves} leaves, so prompts must come in groups of {leaves} equal ones; "
            f"set data.group_size={leaves}, or choose a rollout without a tree"
        )
