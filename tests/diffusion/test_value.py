"""Advantages, targets and loss of a value model, by hand."""

from __future__ import annotations

import torch

from dare_lightning.diffusion.value import clipped_value_loss, outcome_rewards, step_returns

# Two steps of two tokens, one token that does not count, and a last step of one.
STEPS = torch.tensor([[0, 0, 1, -1, 1, 2]])
REWARDS = torch.tensor([[0.0, 1.0, 0.0, 9.0, 0.0, 2.0]], dtype=torch.float64)
VALUES = torch.tensor([[0.2, 0.4, 1.0, 9.0, 0.0, 0.5]], dtype=torch.float64)


def test_advantages_and_targets_over_steps_by_hand() -> None:
    found = step_returns(REWARDS, VALUES, STEPS, gamma=0.5, decay=0.5)
    # r* = 1/2, 0, 2; V* = 0.3, 0.5, 0.5. R* = 1, 1, 2.
    # delta = 0.5 - 0.3 + 0.25 = 0.45; 0 - 0.5 + 0.25 = -0.25; 2 - 0.5 = 1.5. A* = 0.48125, 0.125, 1.5.
    target = [[0 + 0.5 * 1, 1 + 0.5 * 1, 0 + 0.5 * 2, 0, 0 + 0.5 * 2, 2]]
    advantage = [
        [
            0 - 0.2 + 0.5 * 0.5 + 0.25 * 0.125,
            1 - 0.4 + 0.5 * 0.5 + 0.25 * 0.125,
            0 - 1.0 + 0.5 * 0.5 + 0.25 * 1.5,
            0,
            0 - 0.0 + 0.5 * 0.5 + 0.25 * 1.5,
            2 - 0.5,
        ]
    ]
    torch.testing.assert_close(found.target, torch.tensor(target, dtype=torch.float64))
    torch.testing.assert_close(found.advantage, torch.tensor(advantage, dtype=torch.float64))


def test_without_discount_an_outcome_reward_is_every_tokens_target() -> None:
    rewards = outcome_rewards(torch.tensor([2.0], dtype=torch.float64), STEPS)
    assert rewards.tolist() == [[0, 0, 0, 0, 0, 2]]
    found = step_returns(rewards, VALUES, STEPS, gamma=1.0, decay=1.0)
    counted = STEPS >= 0
    torch.testing.assert_close(found.target[counted], torch.full((5,), 2.0, dtype=torch.float64))
    torch.testing.assert_close(found.advantage[counted], 2.0 - VALUES[counted])


def test_without_decay_a_token_looks_one_step_ahead() -> None:
    found = step_returns(REWARDS, VALUES, STEPS, gamma=1.0, decay=0.0)
    following = torch.tensor([[0.5, 0.5, 0.5, 0, 0.5, 0]], dtype=torch.float64)
    expected = torch.where(STEPS >= 0, REWARDS - VALUES + following, 0.0)
    torch.testing.assert_close(found.advantage, expected)


def test_a_sample_does_not_change_with_its_neighbours() -> None:
    longer = torch.tensor([[0, 1, 2, 3, 4, 5]])
    both = step_returns(REWARDS.repeat(2, 1), VALUES.repeat(2, 1), torch.cat([STEPS, longer]), 0.9, 0.8)
    alone = step_returns(REWARDS, VALUES, STEPS, 0.9, 0.8)
    torch.testing.assert_close(both.advantage[:1], alone.advantage)
    torch.testing.assert_close(both.target[:1], alone.target)


def test_where_nothing_counts_everything_is_zero() -> None:
    nothing = torch.full_like(STEPS, -1)
    found = step_returns(REWARDS, VALUES, nothing, 1.0, 1.0)
    assert not found.advantage.any()
    assert not outcome_rewards(torch.ones(1), nothing).any()


def test_the_value_loss_by_hand() -> None:
    values, target = torch.tensor([1.0, 1.0, 0.1, 2.0]), torch.tensor([1.0, 3.0, 1.0, 0.0])
    old = torch.zeros(4)
    # Clipped to 0.2: errors 0.8, 2.8, 0.9, 0.2 against 0, 2, 0.9, 2 of the values themselves; the larger counts.
    torch.testing.assert_close(clipped_value_loss(values, old, target, 0.2), torch.tensor([0.32, 3.92, 0.405, 2.0]))
    torch.testing.assert_close(clipped_value_loss(values, old, target, None), torch.tensor([0.0, 2.0, 0.405, 2.0]))
