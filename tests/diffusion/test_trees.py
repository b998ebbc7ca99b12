"""Values, advantages and targets in a tree, worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from dare_lightning.diffusion.trees import (
    distillation_temperature,
    distillation_weight,
    divergence_from_target,
    node_values,
    segments,
    sibling_advantages,
    sibling_targets,
)

# One tree: a node with two leaves, one with three; and a second one whose numbers repeat those of the first.
NODES = torch.tensor([[0, 0], [0, 1], [1, 2], [1, 3], [1, 4], [0, 0], [1, 1]])
GROUPS = torch.tensor([7, 7, 7, 7, 7, 9, 9])
REWARD = torch.tensor([1.0, 0.0, 0.0, 0.6, 0.0, 0.5, 0.5], dtype=torch.float64)


def test_the_first_leaf_below_a_node_stands_for_it() -> None:
    tree = segments(NODES, GROUPS)
    assert tree.stands[:, 0].tolist() == [True, False, True, False, False, True, True]
    assert tree.stands[:, 1].all()
    assert tree.leader[:, 0].tolist() == [0, 0, 2, 2, 2, 5, 6]


def test_a_node_is_worth_the_mean_of_its_children() -> None:
    values = node_values(REWARD, segments(NODES, GROUPS))
    torch.testing.assert_close(values[:, 0], torch.tensor([0.5, 0.5, 0.2, 0.2, 0.2, 0.5, 0.5], dtype=torch.float64))
    torch.testing.assert_close(values[:, 1], REWARD)


def test_a_segment_is_compared_with_the_mean_of_its_siblings() -> None:
    tree = segments(NODES, GROUPS)
    advantage = sibling_advantages(node_values(REWARD, tree), tree)
    expected = [[0.3, 1.0], [0.3, -1.0], [-0.3, -0.3], [-0.3, 0.6], [-0.3, -0.3], [0.0, 0.0], [0.0, 0.0]]
    torch.testing.assert_close(advantage, torch.tensor(expected, dtype=torch.float64))


def test_the_order_of_the_leaves_moves_nothing() -> None:
    order = torch.tensor([4, 6, 0, 2, 5, 1, 3])
    tree, moved = segments(NODES, GROUPS), segments(NODES[order], GROUPS[order])
    expected = sibling_advantages(node_values(REWARD, tree), tree)
    torch.testing.assert_close(sibling_advantages(node_values(REWARD[order], moved), moved), expected[order])


def test_targets_by_hand() -> None:
    tree = segments(torch.tensor([[0], [1], [2], [3]]), torch.zeros(4, dtype=torch.int64))
    advantage = torch.tensor([[0.5], [0.5], [-1.0], [1.0]], dtype=torch.float64)
    tokens = torch.tensor([[3, 4, 9], [3, 5, 9], [3, 4, 9], [6, 4, 9]])
    active = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 0], [1, 0, 0]]).bool()[:, None]
    target = sibling_targets(advantage, tokens, active, tree, temperature=0.5)
    third = math.e / (math.e + 2)
    expected = [[1 - third, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [third, 0.0, 0.0]]
    torch.testing.assert_close(target.probs[:, 0], torch.tensor(expected, dtype=torch.float64), rtol=1e-7, atol=0)
    # Four children over the two positions at which a better one wrote.
    assert target.weight[:, 0].tolist() == [2.0, 2.0, 0.0, 2.0]


def test_the_divergence_is_zero_at_the_target_and_only_where_it_asks() -> None:
    probs = torch.tensor([0.25, 0.75, 0.0], dtype=torch.float64)
    at = divergence_from_target(probs, (probs + 1e-8).log())
    torch.testing.assert_close(at, torch.zeros_like(at))
    away = divergence_from_target(probs, torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64).log())
    assert float(away.sum()) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), rel=1e-6)


def test_the_weight_rises_and_the_temperature_falls_over_the_run() -> None:
    assert distillation_weight(0.0, 3e-3, 2.0) == 0
    assert distillation_weight(1.0, 3e-3, 2.0) == pytest.approx(3e-3)
    assert distillation_weight(0.5, 1.0, 2.0) == pytest.approx((math.e - 1) / (math.e**2 - 1))
    assert distillation_temperature(0.0, 2.0, 0.7) == 2.0
    assert distillation_temperature(0.75, 2.0, 0.5) == 1.0
    assert distillation_temperature(1.0, 2.0, 0.7) == 1e-6
