"""The load-balancing loss of experts, beside any method's loss."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from dare_lightning.families.experts import RouterBalance, recorded_router_logits
from dare_lightning.methods.d1 import D1
from dare_lightning.methods.sft import SFT
from dare_lightning.methods.tracerl import TraceRL
from dare_lightning.replay.batch import SequenceBatch
from tests.methods.harness import build
from tests.methods.matrix import tiny
from tests.methods.table_model import sequence_batch
from tests.tiny import tiny_llada

MIXTURES = ["llada_moe", "sdar_moe", "llada2"]


def batch(mask_token_id: int, **columns: Any) -> SequenceBatch:
    """Two answers of 6 tokens, the first behind a column of padding."""
    ids = torch.randint(
        7, mask_token_id if mask_token_id > 8 else 60, (2, 10), generator=torch.Generator().manual_seed(1)
    )
    exists = torch.ones(2, 10, dtype=torch.bool)
    exists[0, 0] = False
    steps = torch.tensor([[-1, -1, -1, -1, 0, 0, 1, 1, 2, 2]]).expand(2, -1)
    found: SequenceBatch = sequence_batch(ids, 4, exists, commit_step=steps, advantage=torch.tensor([1.0, -1.0]))
    return replace(found, **columns)


def gradients(module: Any, whole: SequenceBatch) -> dict[str, torch.Tensor]:
    module.zero_grad()
    rows = module.corrupt(whole)
    loss, _ = module.loss_and_metrics(rows, replace(whole, denominator=module.count(whole)))
    loss.backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def by_hand(logits: list[torch.Tensor], exists: torch.Tensor, top_k: int) -> torch.Tensor:
    """E times the sum over experts of (choices a token) x (mean probability), all layers' tokens together."""
    kept = torch.cat([layer[exists.flatten()] for layer in logits])
    probability = kept.softmax(-1)
    picked = torch.zeros_like(probability)
    for token, chosen in enumerate(kept.topk(top_k, -1).indices.tolist()):
        for expert in chosen:
            picked[token, expert] += 1
    return kept.shape[-1] * (picked.mean(0) * probability.mean(0)).sum()


def test_the_loss_of_a_pass_is_the_one_worked_out_by_hand() -> None:
    policy = tiny("llada_moe").double()
    ids, exists = torch.randint(7, 60, (2, 6)), torch.ones(2, 6, dtype=torch.bool)
    exists[0, :2] = False
    watch = RouterBalance(policy, 0.1)
    with watch.recording() as passes:
        policy.denoise(ids, ids, exists)
    with recorded_router_logits(policy) as records:
        policy.denoise(ids, ids, exists)
    loss, metrics = watch.added(torch.tensor(3.0, dtype=torch.float64), passes)
    expected = by_hand([entry[0] for entry in records.values()], exists, top_k=2)
    torch.testing.assert_close(loss, 3 + 0.1 * expected)
    torch.testing.assert_close(metrics["router_balance"][0], expected)
    assert watch.added(loss, []) == (loss, {})


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("method", [SFT, D1, TraceRL])
def test_it_adds_its_gradient_and_off_changes_nothing(family: str, method: Any) -> None:
    policy = tiny(family)
    whole = batch(policy.mask_token_id)
    plain, off = gradients(build(method, policy), whole), gradients(build(method, policy, router_aux_coef=0.0), whole)
    on = gradients(build(method, policy, router_aux_coef=0.5), whole)
    torch.testing.assert_close(off, plain, rtol=0, atol=0)
    gates = [name for name in on if "gate.weight" in name and "expert" not in name]
    assert gates
    assert all(not torch.equal(on[name], plain[name]) for name in gates)


@pytest.mark.parametrize("plan", ["single", "accumulate", "replay"])
@pytest.mark.parametrize("family", MIXTURES)
def test_gradient_plans_and_checkpointing_agree(family: str, plan: str) -> None:
    policy = tiny(family).double()
    whole = batch(policy.mask_token_id)
    settings: dict[str, Any] = {"router_aux_coef": 0.5, "kl_coef": 0.0, "rows_per_forward": 1}
    expected = gradients(build(TraceRL, policy, gradient_plan="single", **settings), whole)
    policy.gradient_checkpointing = True
    found = gradients(build(TraceRL, policy, gradient_plan=plan, **settings), whole)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_micro_batches_share_it() -> None:
    module = build(SFT, tiny("llada_moe").double(), router_aux_coef=0.5)
    whole = batch(module.policy.mask_token_id)
    whole = replace(whole, denominator=module.count(whole))
    rows = module.corrupt(whole)
    one, metrics = module.loss_and_metrics(rows, whole)
    half, _ = module.loss_and_metrics(rows, whole, micro_batches=2)
    value, weight = metrics["router_balance"]
    torch.testing.assert_close(one - half, 0.25 * value / weight)
    with torch.no_grad():
        validated, metrics = module.loss_and_metrics(rows, whole)
    assert "router_balance" not in metrics
    torch.testing.assert_close(validated, one - 0.5 * value / weight)


def test_a_policy_without_experts_and_a_negative_weight_are_refused() -> None:
    adam = partial(torch.optim.Adam, lr=0.1)
    with pytest.raises(ValueError, match="router_aux_coef=0.01 .* LLaDA has 0 mixtures of experts: use 0"):
        D1(tiny_llada(), adam, router_aux_coef=0.01)
    with pytest.raises(ValueError, match="router_aux_coef=-1 .* at least 0"):
        D1(tiny("llada_moe"), adam, router_aux_coef=-1)
