"""Scores of denoising steps, by hand and against the recorded ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dare_lightning.diffusion.advantages import ESTIMATORS, group_advantages
from dare_lightning.diffusion.step_credit import held_rewards, step_scores, strongest_steps
from tests.methods.table_model import golden
from tests.methods.trajectories import double
from tests.shared import golden_files

CASES = golden_files("algorithms/mdpo_step_advantage_*.json")


def test_a_finished_completion_keeps_its_last_reward() -> None:
    rewards = torch.tensor([[0.0, 1.0, 9.0], [0.0, 1.0, 0.5]])
    assert held_rewards(rewards, torch.tensor([2, 3]), 4).tolist() == [[0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 0.5, 0.5]]


def test_step_scores_by_hand() -> None:
    got = step_scores(torch.tensor([[1.0, 0.0, 0.5]]))
    # (1 - 0 + 1) + (0 + 0.5) / 2, (0 - 1 + 1) + 0.5, (0.5 - 0 + 1) + 0.5
    torch.testing.assert_close(got, torch.tensor([[2.25, 0.5, 2.0]]))
    torch.testing.assert_close(step_scores(torch.tensor([[0.5]])), torch.tensor([[2.0]]))


def test_strongest_steps_come_in_their_order() -> None:
    assert strongest_steps(torch.tensor([1.0, 3.0, 2.0, 3.0]), 2).tolist() == [1, 3]
    assert strongest_steps(torch.tensor([2.0, 1.0]), 5).tolist() == [0, 1]
    assert strongest_steps(torch.tensor([1.0, 1.0, 1.0]), 1).tolist() == [0]


@pytest.mark.parametrize("path", CASES)
@pytest.mark.parametrize(
    ("name", "estimator"),
    [("advantages_original", "grpo_1e4"), ("advantages_dare", "grpo"), ("advantages_no_std", "no_std")],
)
def test_step_advantages_are_the_recorded_ones(path: Path, name: str, estimator: str) -> None:
    case = golden(path)
    groups = torch.tensor(case["inputs"]["group_ids"])
    scores = step_scores(double(case["inputs"]["step_rewards"]))
    got = [group_advantages(column, groups, ESTIMATORS[estimator]).advantage for column in scores.unbind(1)]
    torch.testing.assert_close(torch.stack(got, 1), double(case["outputs"][name]), **case["tolerance"])


@pytest.mark.parametrize("path", CASES)
def test_the_chosen_steps_are_the_recorded_ones(path: Path) -> None:
    case = golden(path)
    strength = double(case["outputs"]["advantages_dare"]).abs().sum(0)
    assert strongest_steps(strength, case["config"]["top_k"]).tolist() == case["outputs"]["top_k_steps_dare"]
