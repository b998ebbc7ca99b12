"""Clipped surrogate, divergences and aggregation on hand-made and extreme inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dare_lightning.diffusion.likelihood import coupled_token_log_probs, inverse_level, masked_mean, masked_sum
from dare_lightning.diffusion.losses import (
    AGGREGATIONS,
    ClippedObjective,
    ClipRange,
    aggregate,
    clipped_policy_loss,
    clipped_surrogate,
    contributions,
    denominators,
    kl_estimate,
)


def _double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _textbook(log_ratio: Tensor, advantage: Tensor, clip: ClipRange) -> Tensor:
    ratio = log_ratio.exp()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip.low, 1 + clip.high))
    if clip.dual is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -advantage * clip.dual), loss)
    return loss


@pytest.mark.parametrize("dual", [None, 3.0])
@pytest.mark.parametrize("sign", [1.0, -1.0, 0.0])
def test_the_log_domain_form_equals_the_textbook_in_value_and_gradient(sign: float, dual: float | None) -> None:
    clip = ClipRange(0.2, 0.28, dual)
    # Not on the clip bounds themselves, where the textbook's gradient is a matter of taste.
    ours = torch.linspace(-2.99, 3.01, 101, dtype=torch.float64, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    advantage = torch.full_like(ours, 1.5 * sign).detach()
    loss, expected = clipped_surrogate(ours, advantage, clip).loss, _textbook(theirs, advantage, clip)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(v.sum(), x)[0] for v, x in ((loss, ours), (expected, theirs))))


def test_a_ratio_of_one_gives_the_plain_policy_gradient() -> None:
    log_probs = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    advantage = _double(2.0, -1.0, 0.5, 0.0)
    loss = clipped_surrogate(log_probs - log_probs.detach(), advantage, ClipRange(0.0, 0.0)).loss
    torch.testing.assert_close(loss.detach(), -advantage)
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), log_probs)[0], -advantage)


@pytest.mark.parametrize("dual", [None, 3.0])
@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_extreme_log_ratios_give_a_finite_loss_and_gradient(kind: Any, dual: float | None) -> None:
    log_probs = torch.tensor([[-1000.0, 1000.0, -1.5, 88.0], [-1000.0, 1000.0, -1.5, 88.0]], requires_grad=True)
    old, mask = torch.zeros(2, 4), torch.ones(2, 4, dtype=torch.bool)
    loss, metrics = clipped_policy_loss(
        log_probs, old, old, torch.tensor([1.0, -1.0]), mask, ClipRange(dual=dual), kl_coef=0.1, kl_kind=kind
    )
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    assert loss.isfinite().all()
    assert gradient.isfinite().all()
    assert [float(v) for v in metrics["ratio_clamped_fraction"]] == [6.0, 8.0]
    assert all(torch.isfinite(part) for pair in metrics.values() for part in pair)


def test_what_does_not_count_may_be_anything() -> None:
    log_probs = torch.tensor([[0.1, torch.nan], [torch.inf, 0.2]], requires_grad=True)
    mask = torch.tensor([[True, False], [False, True]])
    loss, metrics = clipped_policy_loss(
        log_probs, torch.zeros(2, 2), torch.zeros(2, 2), torch.tensor([1.0, -1.0]), mask, ClipRange(), kl_coef=0.1
    )
    value = aggregate(loss, mask, "token_mean")
    assert value.isfinite()
    assert torch.autograd.grad(value, log_probs)[0][mask].isfinite().all()
    assert metrics["ratio_mean"][0].isfinite()


def test_metrics_count_what_was_clipped() -> None:
    log_ratio = torch.tensor([[0.5, -0.5, 0.0, 0.5], [0.5, -0.5, 2.0, 9.0]])
    mask = torch.tensor([[True, True, True, False], [True, True, True, False]])
    _, metrics = clipped_policy_loss(
        log_ratio, torch.zeros(2, 4), None, torch.tensor([1.0, -1.0]), mask, ClipRange(0.2, 0.2, 3.0)
    )
    assert [float(v) for v in metrics["clip_fraction"]] == [2.0, 6.0]  # one with A > 0 above, one with A < 0 below
    assert [float(v) for v in metrics["dual_clip_fraction"]] == [1.0, 6.0]
    assert float(metrics["ratio_max"][0]) == pytest.approx(float(torch.tensor(2.0).exp()))
    assert "kl" not in metrics


def test_nothing_to_count_gives_zero() -> None:
    log_probs = torch.ones(2, 3, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    loss, _ = clipped_policy_loss(log_probs, torch.zeros(2, 3), None, torch.ones(2), mask, ClipRange())
    mode: Any
    for mode in AGGREGATIONS:
        assert float(aggregate(loss.detach(), mask, mode, torch.full((2,), 3))) == 0.0


def test_divergences_of_equal_policies_are_zero_and_k3_is_never_negative() -> None:
    values = torch.linspace(-30, 30, 61, dtype=torch.float64)
    for kind in ("k1", "abs", "k2", "k3"):
        assert (kl_estimate(kind, values, values) == 0).all()
    k3 = kl_estimate("k3", values, torch.zeros_like(values))
    assert (k3 >= 0).all()
    assert k3.max() <= 10


def test_aggregations_by_hand() -> None:
    loss = torch.tensor([[4.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    mask = torch.tensor([[True, False, False], [True, True, True]])
    room = torch.tensor([3, 3])
    got = [float(aggregate(loss, mask, mode, room)) for mode in AGGREGATIONS]  # type: ignore[arg-type]
    assert got == pytest.approx([7 / 4, 7 / 2, 5 / 2, 7 / 6, 7 / 3])


@pytest.mark.parametrize("mode", AGGREGATIONS[:-1])
def test_splitting_a_step_leaves_its_aggregate_alone(mode: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    loss = torch.randn(4, 6, generator=draw, dtype=torch.float64)
    mask = torch.rand(4, 6, generator=draw) < 0.6
    room = torch.full((4,), 6)
    parts = [slice(0, 1), slice(1, 4)]
    total = sum(contributions(loss[p], mask[p], mode, room[p]).sum() for p in parts)
    count = sum(denominators(mask[p], mode, room[p]).sum() for p in parts)
    torch.testing.assert_close(total / count, aggregate(loss, mask, mode, room))


def test_token_mean_weighs_tokens_and_not_micro_batches() -> None:
    # One micro-batch with 1 token of loss 4, one with 9 tokens of loss 1.
    parts = [(torch.tensor([[4.0]]), torch.ones(1, 1).bool()), (torch.ones(1, 9), torch.ones(1, 9).bool())]
    total = sum(contributions(loss, mask, "token_mean").sum() for loss, mask in parts)
    count = sum(denominators(mask, "token_mean").sum() for _, mask in parts)
    assert float(total / count) == pytest.approx(1.3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ClipRange(low=1.0), "clip_low=1.0"),
        (lambda: ClipRange(high=-0.1), "clip_high=-0.1"),
        (lambda: ClipRange(dual=1.0), "dual_clip=1.0.*null"),
        (lambda: ClippedObjective(ClipRange(), "mean"), "aggregation='mean'.*token_mean"),  # type: ignore[arg-type]
        (lambda: ClippedObjective(ClipRange(), "sequence_sum_token_sum_norm"), "choose one of token_mean"),
        (lambda: ClippedObjective(ClipRange(), kl_kind="k1"), "k1.*cannot serve"),
        (lambda: denominators(torch.ones(1, 1).bool(), "dr_grpo"), "pass canvas"),
        (lambda: kl_estimate("k4", _double(0.0), _double(0.0)), "'k4'.*k3"),  # type: ignore[arg-type]
        (lambda: coupled_token_log_probs(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3)), "3 rows.*found 2"),
    ],
)
def test_settings_out_of_range_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_masked_reductions_ignore_what_lies_outside() -> None:
    values = torch.tensor([[1.0, 3.0, torch.nan], [torch.nan, torch.nan, torch.nan]])
    mask = torch.tensor([[True, True, False], [False, False, False]])
    assert masked_sum(values, mask).tolist() == [4.0, 0.0]
    assert masked_mean(values, mask).tolist() == [2.0, 0.0]


def test_the_inverse_of_level_zero_is_zero() -> None:
    assert inverse_level(_double(0.0, 0.25)).tolist() == [0.0, 4.0]
