"""Group-relative advantages."""

from __future__ import annotations

import math

import pytest
import torch

from dare_lightning.diffusion.advantages import ESTIMATORS, estimator, group_advantages

REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0])
GROUPS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
SAMPLE_STD = torch.tensor([1.0, -1.0, -1.0, 1.0, 0.0, 0.0, 0.0, 0.0]) * math.sqrt(3) / 2

every_estimator = pytest.mark.parametrize("name", ESTIMATORS)


@pytest.mark.parametrize(
    "order",
    [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 4, 1, 5, 2, 6, 3, 7],
        [6, 1, 3, 4, 0, 7, 2, 5],
    ],
    ids=["grouped", "interleaved", "permuted"],
)
def test_advantages_follow_the_prompt_whatever_the_order(order: list[int]) -> None:
    got = group_advantages(REWARDS[order], GROUPS[order], estimator("grpo"))
    torch.testing.assert_close(got.advantage, SAMPLE_STD[order], rtol=0, atol=1e-5)
    assert (got.advantage[GROUPS[order] == 1] == 0).all()
    assert (got.groups, got.zero_variance) == (2, 1)


def test_group_numbers_need_not_be_consecutive() -> None:
    got = group_advantages(REWARDS, GROUPS * 1000 + 7, estimator("grpo"))
    torch.testing.assert_close(got.advantage, SAMPLE_STD, rtol=0, atol=1e-5)


def test_a_batch_that_is_not_whole_groups_names_both_numbers_and_the_nearest_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"6 completions .* groups of 4.*\{1: 2\}.*4 and 8"):
        group_advantages(REWARDS[:6], GROUPS[:6], estimator("grpo"))


@every_estimator
def test_a_group_of_one_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="at least 2.*group_size"):
        group_advantages(torch.tensor([1.0, 2.0]), torch.tensor([0, 1]), estimator(name))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=r"samples \[1\] are not finite"):
        group_advantages(torch.tensor([1.0, bad]), torch.tensor([0, 0]), estimator("grpo"))


@every_estimator
@pytest.mark.parametrize("value", [0.1, 1e6, -1 / 3])
def test_equal_rewards_give_exactly_zero(name: str, value: float) -> None:
    advantage = estimator(name)(torch.full((2, 7), value))
    assert torch.equal(advantage, torch.zeros(2, 7))


@every_estimator
def test_advantages_of_a_group_add_up_to_nothing(name: str) -> None:
    rewards = torch.rand(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(estimator(name)(rewards).sum(1), torch.zeros(5, dtype=torch.float64), atol=1e-12, rtol=0)


def test_leave_one_out_by_hand() -> None:
    got = estimator("leave_one_out")(torch.tensor([[1.0, 0.0, 0.0]]))  # the others' means: 0, 1/2, 1/2
    torch.testing.assert_close(got, torch.tensor([[1.0, -0.5, -0.5]]))


def test_an_unknown_estimator_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'gpro'.*grpo, .*z_score"):
        estimator("gpro")
