"""Mixtures of experts: routing, grouped products, auxiliary losses, and names."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from dare_lightning.families import experts
from dare_lightning.families.experts import ExpertPlaces, Experts, MixtureOfExperts


def mixture(bias: list[float] | None = None, normalize: bool = False, count: int = 3, top_k: int = 2):
    made = MixtureOfExperts(4, 6, count, top_k, bias is not None, normalize).double()
    torch.manual_seed(0)
    for weight in made.parameters():
        torch.nn.init.normal_(weight)
    if bias is not None:
        made.expert_bias.copy_(torch.tensor(bias))
    return made


def test_routing_by_hand():
    logits = torch.tensor([[math.log(5), math.log(3), math.log(2)]])
    weights, chosen = mixture().route(logits)
    assert chosen.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0.3]]))
    weights, chosen = mixture(normalize=True).route(logits)
    torch.testing.assert_close(weights, torch.tensor([[0.625, 0.375]]))
    # The bias moves the choice and is part of the weight.
    weights, chosen = mixture(bias=[0.0, 0.0, 0.2]).float().route(logits)
    assert chosen.tolist() == [[0, 2]]
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0.4]]))


def test_scores_are_float32_for_bfloat16_logits():
    weights, _ = mixture().route(torch.randn(5, 3, dtype=torch.bfloat16))
    assert weights.dtype == torch.float32


@pytest.mark.parametrize("bias", [None, [0.1, 0.0, 0.3]])
def test_the_output_is_the_weighted_sum_over_each_tokens_experts(bias):
    layer, x = mixture(bias), torch.randn(2, 5, 4, dtype=torch.float64)
    expected = torch.zeros_like(x)
    for place in [(i, j) for i in range(2) for j in range(5)]:
        weights, chosen = layer.route(layer.gate(x[place])[None])
        for weight, j in zip(weights[0], chosen[0], strict=True):
            up, gate = layer.experts.up_proj[j] @ x[place], layer.experts.gate_proj[j] @ x[place]
            expected[place] += weight * (layer.experts.down_proj[j] @ (F.silu(gate) * up))
    torch.testing.assert_close(layer(x), expected)


def test_a_bias_does_not_stop_the_gradient():
    layer = mixture(bias=[0.1, 0.0, 0.3])
    layer(torch.randn(3, 4, dtype=torch.float64)).sum().backward()
    assert layer.gate.weight.grad.abs().max() > 0


def test_the_grouped_kernel_equals_the_loop_with_its_gradients():
    counts = torch.tensor([3, 0, 5])
    results = []
    for product in (experts.grouped_loop, experts.grouped_mm):
        torch.manual_seed(0)
        x, weight = torch.randn(8, 16, requires_grad=True), torch.randn(3, 24, 16, requires_grad=True)
        out = product(x, weight, counts)
        (out * torch.arange(24)).sum().backward()
        results.append((out.detach(), x.grad, weight.grad))
    torch.testing.assert_close(results[1], results[0])
    assert results[0][2][1].abs().max() == 0


def test_no_token_is_no_output():
    assert Experts(2, 4, 6)(torch.zeros(0, 4), torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, 1)).shape == (0, 4)


def test_balance_by_hand():
    # Two tokens, three experts, two chosen by each: shares 1, 1/2, 1/2 and mean probabilities 0.5, 0.25, 0.25.
    logits = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.2, 0.3]]).log()
    torch.testing.assert_close(experts.load_balancing_loss(logits, 2), torch.tensor(3 * (0.5 + 0.125 + 0.125)))


def test_balance_is_lowest_where_it_is_even_and_padding_does_not_count():
    torch.testing.assert_close(experts.load_balancing_loss(torch.zeros(6, 4), 2), torch.tensor(2.0))
    skewed = torch.tensor([[9.0, 0, 0, 0], [0, 9.0, 0, 0], [9.0, 0, 0, 0]])
    exists = torch.tensor([True, True, False])
    torch.testing.assert_close(
        experts.load_balancing_loss(skewed, 1, exists), experts.load_balancing_loss(skewed[:2], 1)
    )
    assert experts.load_balancing_loss(skewed, 1) > experts.load_balancing_loss(skewed[:2], 1)


def test_balance_counts_the_choice_with_its_bias():
    logits, bias = torch.tensor([[2.0, 1.0]]), torch.tensor([0.0, 1.0])
    probability = logits.softmax(-1)[0, 1]
    torch.testing.assert_close(experts.load_balancing_loss(logits, 1, expert_bias=bias), 2 * probability)


def test_z_loss_by_hand():
    logits = torch.tensor([[0.0, 0.0], [math.log(3), 0.0], [50.0, 50.0]])
    expected = torch.tensor((math.log(2) ** 2 + math.log(4) ** 2) / 2)
    torch.testing.assert_close(experts.router_z_loss(logits, torch.tensor([True, True, False])), expected)


def test_recorded_logits_carry_gradients_and_recording_ends():
    layer, x = mixture(), torch.randn(5, 4, dtype=torch.float64)
    with experts.recorded_router_logits(layer) as records:
        layer(x)
        layer(x[:2])
    layer(x)
    (found,) = records.values()
    assert [tuple(logits.shape) for logits in found] == [(5, 3), (2, 3)]
    experts.load_balancing_loss(found[0], 2).backward()
    assert layer.gate.weight.grad.abs().max() > 0


def test_published_names_are_views_of_the_stack_and_lead_back():
    state = {"a.experts.up_proj": torch.randn(3, 6, 4), "a.gate.weight": torch.randn(3, 4)}
    published = experts.split_experts(state)
    assert list(published) == [*(f"a.experts.{j}.up_proj.weight" for j in range(3)), "a.gate.weight"]
    assert published["a.experts.2.up_proj.weight"].data_ptr() == state["a.experts.up_proj"][2].data_ptr()
    collected: dict[str, torch.Tensor] = {}
    places = ExpertPlaces(state)
    for name in reversed(published):
        places.put(collected, name, published[name])
    torch.testing.assert_close(collected, state, rtol=0, atol=0, check_stride=False)
