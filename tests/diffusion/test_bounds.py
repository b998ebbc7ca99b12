"""Bounds of ratios and of likelihoods, preference losses, and what is reported about them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dare_lightning.diffusion.bounds import (
    SandwichBounds,
    boundary_ratio,
    boundary_surrogate,
    sandwich_bounds,
    sandwiched,
)
from dare_lightning.diffusion.diagnostics import derived, estimator_spread, ratio_metrics
from dare_lightning.diffusion.losses import ClipRange
from dare_lightning.diffusion.preference import dpo_loss, find_pairs, margins


def _double(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_bound_of_the_ratio_lies_below_for_either_sign() -> None:
    delta = torch.randn(50, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for advantage in (1.5, -0.5):
        weight = torch.tensor(advantage, dtype=torch.float64)
        bound = (weight * boundary_ratio(delta, weight)).mean(-1)
        assert (bound <= weight * delta.mean(-1).exp() + 1e-12).all()


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_both_sides_of_the_bound_have_one_gradient_on_policy(advantage: float) -> None:
    delta = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    surrogate = boundary_surrogate(delta, _double(advantage), ClipRange(0.2, 0.2, 3.0))
    torch.testing.assert_close(surrogate.loss, torch.full_like(delta, -advantage))
    (gradient,) = torch.autograd.grad(surrogate.loss.sum(), delta)
    torch.testing.assert_close(gradient, torch.full_like(delta, -advantage))


def test_the_bound_is_clipped_as_a_ratio_is_and_needs_no_logarithm() -> None:
    delta = _double(-3.0, -0.1, 0.1, 0.5, 1000.0).requires_grad_()
    up = boundary_surrogate(delta, _double(1.0), ClipRange(0.2, 0.2))
    torch.testing.assert_close(up.loss, _double(2.0, -0.9, -1.1, -1.2, -1.2))
    assert up.clipped.tolist() == [False, False, False, True, True]
    down = boundary_surrogate(delta, _double(-1.0), ClipRange(0.2, 0.2, 3.0))
    torch.testing.assert_close(down.loss, _double(0.8, math.exp(-0.1), math.exp(0.1), math.exp(0.5), 3.0))
    assert down.clipped.tolist() == [True, False, False, False, False]
    assert down.dual_clipped.tolist() == [False] * 4 + [True]
    (gradient,) = torch.autograd.grad((up.loss + down.loss).sum(), delta)
    assert gradient.isfinite().all()


def test_sandwich_bounds_by_hand() -> None:
    # Two tokens; the first row hides both, the second one the first. beta = 2.
    p = _double([0.5, 0.25], [0.8, 1.0])
    weight = _double([1.0, 1.0], [1.0, 0.0])
    bounds = sandwich_bounds(p.log()[None] * weight, weight[None], torch.ones(1, 2, dtype=torch.bool), 2.0)
    lower = (math.log(0.5) + math.log(0.25)) / 2 / 2 + math.log(0.8) / 2
    first = (0.5**2 + 0.8**2 / 0.5) / 2
    second = 0.25**2 / 2
    torch.testing.assert_close(bounds.lower, _double(lower))
    torch.testing.assert_close(bounds.upper, _double((math.log(first) + math.log(second)) / 2 / 2))


def test_with_one_row_the_bounds_differ_by_a_constant_and_with_two_they_do_not() -> None:
    draw = torch.Generator().manual_seed(1)
    counted = torch.ones(3, 6, dtype=torch.bool)
    weight = (torch.rand(3, 2, 6, generator=draw) < 0.6).double()
    weight[:, :, 0] = 1
    log_probs = (-torch.rand(3, 2, 6, generator=draw, dtype=torch.float64) * weight).requires_grad_()
    for rows, same in ((1, True), (2, False)):
        bounds = sandwich_bounds(log_probs[:, :rows], weight[:, :rows], counted, 1.5)
        gradients = [torch.autograd.grad(b.sum(), log_probs, retain_graph=True)[0][:, :rows] for b in bounds]
        assert torch.allclose(*gradients) == same


def test_the_upper_bound_does_not_underflow_and_ignores_what_no_row_hides() -> None:
    weight = torch.zeros(2, 2, 3, dtype=torch.float64)
    weight[0, :, :2] = 1
    log_probs = (torch.full((2, 2, 3), -5000.0, dtype=torch.float64) * weight).requires_grad_()
    bounds = sandwich_bounds(log_probs, weight, torch.ones(2, 3, dtype=torch.bool), 1.5)
    torch.testing.assert_close(bounds.upper[0], torch.tensor(-5000 - math.log(2 / 3) / 1.5, dtype=torch.float64))
    assert bounds.upper[1] == bounds.lower[1] == 0
    gradient = torch.autograd.grad((bounds.upper + bounds.lower).sum(), log_probs)[0]
    assert gradient.isfinite().all()
    assert not gradient[1].any()


def test_good_completions_are_judged_by_the_lower_bound_and_others_as_asked() -> None:
    bounds = SandwichBounds(_double(-3.0, -3.0, -3.0), _double(-1.0, -1.0, -1.0))
    advantage = _double(1.0, 0.0, -1.0)
    assert sandwiched(bounds, advantage, "eubo", 0.25).tolist() == [-3, -1, -1]
    assert sandwiched(bounds, advantage, "elbo", 0.25).tolist() == [-3, -3, -3]
    assert sandwiched(bounds, advantage, "mix", 0.25).tolist() == [-3, -2.5, -2.5]


def test_pairs_are_found_in_any_order_and_the_larger_reward_is_preferred() -> None:
    pairs = find_pairs(torch.tensor([7, 2, 2, 7]), torch.tensor([0.0, 1.0, 0.5, 3.0]))
    assert sorted(zip(pairs.chosen.tolist(), pairs.rejected.tolist(), strict=True)) == [(1, 2), (3, 0)]


def test_what_is_no_pair_is_refused_with_its_number() -> None:
    with pytest.raises(ValueError, match=r"3 answers are not whole pairs: \{2: 1\} \(pair: answers\)"):
        find_pairs(torch.tensor([2, 7, 7]), torch.tensor([1.0, 1.0, 0.0]))
    with pytest.raises(ValueError, match=r"pairs \[4\] prefer neither"):
        find_pairs(torch.tensor([4, 4]), torch.tensor([1.0, 1.0]))
    with pytest.raises(ValueError, match="has no pairs: group_index and reward.*data=preference"):
        find_pairs(None, None)


def test_a_margin_is_the_gain_of_one_answer_over_the_other_and_its_loss_the_sigmoid() -> None:
    current = _double([-4.0, -6.0], [-9.0, -7.0])
    ref = _double([-5.0, -8.0], [-6.0, -7.0])
    margin = margins(current, ref, find_pairs(torch.tensor([0, 0]), torch.tensor([1.0, 0.0])))
    torch.testing.assert_close(margin, _double(1.5 + 1.5))
    torch.testing.assert_close(dpo_loss(margin, 0.2), _double(math.log(1 + math.exp(-0.6))))
    assert dpo_loss(_double(1e6, -1e6), 0.2).tolist() == [0.0, pytest.approx(2e5)]


def test_the_effective_sample_size_falls_with_the_spread_of_the_ratios() -> None:
    ratio, nothing = _double(1.0, 3.0, 99.0), torch.zeros(3, dtype=torch.bool)
    mask = torch.tensor([True, True, False])
    metrics = ratio_metrics(ratio, mask, nothing, nothing, nothing, torch.zeros_like(ratio))
    values = {name: total / weight for name, (total, weight) in metrics.items()}
    assert float(derived(values)["effective_sample_size"]) == pytest.approx(16 / 10 / 2)
    assert derived({}) == {}
    assert values["ratio_mean"] == 2
    assert values["ratio_max"] == 3


def test_the_spread_of_an_estimator_is_a_deviation_per_token() -> None:
    draws = _double([-4.0, -8.0], [-1.0, -1.0], [5.0, -5.0])
    total, weight = estimator_spread(draws, torch.tensor([2, 4, 0]))["estimator_std"]
    assert float(total / weight) == pytest.approx(8**0.5 / 2 / 2)
    assert estimator_spread(draws[:, :1], torch.tensor([2, 4, 0])) == {}
