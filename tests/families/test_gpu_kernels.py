"""Kernels that need a GPU against those that run everywhere: `pytest -m gpu -n0 -rs`."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from dare_lightning.families import fused
from dare_lightning.families.attention import View
from dare_lightning.families.base import chosen_log_probs, using_attention
from dare_lightning.families.tiny import new_tiny_dream, new_tiny_llada, new_tiny_sdar

GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA device; PyTorch finds none here")
POLICIES = {"llada": new_tiny_llada, "dream": new_tiny_dream, "sdar": new_tiny_sdar}


def _states_and_gradient(policy: Any, ids: Tensor, exists: Tensor, attention: str) -> tuple[Tensor, Tensor]:
    policy.zero_grad()
    with using_attention(policy, attention):
        hidden = policy.hidden_states(ids, exists)
    (hidden * exists[..., None]).sum().backward()
    gradients = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
    return hidden[exists].detach(), torch.cat(gradients)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("family", POLICIES)
def test_flex_trains_on_a_gpu_as_sdpa_does(family: str) -> None:
    policy = POLICIES[family](layers=2, width=64, heads=2).cuda()
    ids = torch.randint(7, 40, (3, 150), device="cuda")
    exists = torch.arange(150, device="cuda") < torch.tensor([[150], [97], [130]], device="cuda")
    expected, found = (_states_and_gradient(policy, ids, exists, name) for name in ("sdpa", "flex"))
    torch.testing.assert_close(found[0], expected[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_packed_rows_in_half_precision_give_the_padded_states(family: str) -> None:
    policy = POLICIES[family](layers=2, width=64, heads=2).cuda().bfloat16()
    ids = torch.randint(7, 40, (3, 150), device="cuda")
    exists = torch.arange(150, device="cuda") < torch.tensor([[150], [97], [130]], device="cuda")
    expected, found = (_states_and_gradient(policy, ids, exists, name) for name in ("sdpa", "varlen"))
    torch.testing.assert_close(found[0], expected[0], rtol=0.05, atol=0.05)
    torch.testing.assert_close(found[1], expected[1], rtol=0.1, atol=0.1)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.skipif(importlib.util.find_spec(fused.PACKAGE) is None, reason='needs `pip install ".[fused]"`')
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_fused_head_gives_the_log_probs_and_gradients_of_the_pieces(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = new_tiny_llada(layers=1, width=64, heads=2).cuda().bfloat16()
    hidden = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(0, 40, (300,), device="cuda")
    weight = torch.randn(300, device="cuda")
    found = []
    for package in (fused.PACKAGE, "not_installed"):
        monkeypatch.setattr(fused, "PACKAGE", package)
        states = hidden.clone().requires_grad_()
        policy.zero_grad()
        scored = chosen_log_probs(policy, states, targets, temperature)
        (scored * weight).sum().backward()
        found.append((scored.detach(), states.grad, policy.head_weight.grad))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0.05, atol=0.05)


def test_the_fused_head_serves_half_precision_on_a_gpu_alone() -> None:
    weight, hidden = torch.randn(9, 4).bfloat16(), torch.randn(3, 4).bfloat16()
    assert fused.half_precision(hidden) is None
    assert fused.fused_log_probs(weight, hidden, torch.tensor([1, 2, 3]), 1.0) is None


def test_a_head_is_fused_only_where_it_is_a_product_with_its_weight() -> None:
    policy = new_tiny_llada(layers=1, width=16, heads=2)
    hidden = torch.randn(5, 16)
    torch.testing.assert_close(hidden @ policy.head_weight.T, policy.logits(hidden))
    torch.nn.utils.parametrizations.weight_norm(policy.head)
    assert policy.head_weight is None


@pytest.mark.gpu
@needs_gpu
def test_a_cached_pass_on_the_gpu_reads_what_it_reads_on_the_cpu() -> None:
    from dare_lightning.families.attention import KeyValueCache

    found = []
    for device in ("cpu", "cuda"):
        policy = new_tiny_sdar(layers=2, width=32, heads=2).to(device)
        columns = torch.arange(8, device=device)[None]
        cache, rows = KeyValueCache(1, 8), torch.zeros(1, dtype=torch.int64, device=device)
        with torch.no_grad():
            policy.hidden_states(columns + 7, view=View(columns, None, cache, rows, columns))
            tail = columns[:, 4:]
            found.append(policy.hidden_states(tail + 9, view=View(tail, None, cache, rows, tail)).cpu())
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)
