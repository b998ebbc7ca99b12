"""Before the first update the policy equals itself, and its loss is the plain policy gradient."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dare_lightning.families.adapters import LoRA
from dare_lightning.families.tiny import new_tiny_sdar
from dare_lightning.methods.bgpo import BGPO
from dare_lightning.methods.coupled_grpo import CoupledGRPO
from dare_lightning.methods.d1 import D1
from dare_lightning.methods.ebpo import EBPO
from dare_lightning.methods.espo import ESPO
from dare_lightning.methods.sft import SFT
from dare_lightning.methods.spg import SPG
from dare_lightning.methods.vrpo import VRPO
from dare_lightning.replay.batch import SequenceBatch
from tests.methods.harness import build, run
from tests.methods.table_model import TablePolicy, random_tables, sequence_batch
from tests.tiny import EOS, tiny_llada

BY_TOKEN = [D1, CoupledGRPO]
BY_SEQUENCE = [BGPO, EBPO, ESPO]
ONLINE = [*BY_TOKEN, *BY_SEQUENCE, SPG]
online = pytest.mark.parametrize("method", ONLINE)


def _table(method: Any) -> TablePolicy:
    """A policy on which the method is defined."""
    return TablePolicy(random_tables(), block_length=4 if method is EBPO else None)


def _real(method: Any) -> Any:
    """The same, a real model."""
    return new_tiny_sdar(layers=2, width=16, heads=2) if method is EBPO else tiny_llada()


def _rollout(samples: int = 4, length: int = 14, vocabulary: int = 35) -> SequenceBatch:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(5, vocabulary, (samples, length), generator=draw)
    ids[0, 9:] = EOS
    batch = sequence_batch(ids, torch.tensor([3, 4, 2, 5])[:samples])
    completion = batch.response_mask.clone()
    completion[0, 10:] = False
    advantage = torch.tensor([1.0, -1.0, 0.5, -0.5])[:samples]
    return replace(batch, completion_mask=completion, advantage=advantage)


def _metrics(module: Any, batch: SequenceBatch) -> dict[str, float]:
    rows = module.corrupt(batch)
    _, metrics = module.loss_and_metrics(rows, replace(batch, denominator=module.denominator(rows, batch)))
    return {name: float(total / weight) for name, (total, weight) in metrics.items()}


@pytest.mark.parametrize("method", [*BY_TOKEN, *BY_SEQUENCE])
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("split", [1, 4])
def test_every_first_pass_has_ratio_one_and_no_divergence(method: Any, adapter: bool, split: int) -> None:
    policy: Any = _real(method)
    if adapter:
        LoRA(rank=4, alpha=8.0).apply(policy)
    module = build(method, policy, kl_coef=0.1)
    batch = module.freeze_policies(_rollout(), inner_epochs=2, keep_old=True)
    for iteration in range(2):
        for part in torch.arange(len(batch)).chunk(split):
            metrics = _metrics(module, replace(batch.select(part), iteration=iteration))
            assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
            assert metrics["ratio_max"] == pytest.approx(1, abs=1e-5)
            assert metrics["ratio_square_mean"] == pytest.approx(1, abs=1e-5)
            assert metrics["old_kl"] == pytest.approx(0, abs=1e-6)
            assert metrics["clip_fraction"] == 0
            assert metrics["kl"] == pytest.approx(0, abs=1e-6)
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.5)
    rows = module.corrupt(batch)
    loss, _ = module.loss_and_metrics(rows, replace(batch, denominator=module.denominator(rows, batch)))
    loss.backward()
    optimizer.step()
    assert abs(_metrics(module, batch)["ratio_mean"] - 1) > 1e-5


@pytest.mark.parametrize("method", [*ONLINE, SFT, VRPO])
def test_masks_depend_on_sample_and_inner_epoch_alone(method: Any) -> None:
    module = build(method, _real(method))
    batch = _rollout()
    whole = module.corrupt(batch).noisy_ids
    assert torch.equal(module.corrupt(batch.select(torch.tensor([2, 0]))).noisy_ids, whole[[2, 0]])
    assert not torch.equal(module.corrupt(replace(batch, iteration=1)).noisy_ids, whole)
    assert torch.equal(module.eval().corrupt(batch).noisy_ids, whole)


@pytest.mark.parametrize("method", [*ONLINE, SFT])
def test_two_passes_with_one_seed_give_one_loss(method: Any) -> None:
    module = build(method, _real(method))
    batch = module.freeze_policies(_rollout(), 1, keep_old=True) if method.online else _rollout()
    torch.manual_seed(0)
    first = _metrics(module, batch)
    torch.manual_seed(1)
    assert _metrics(module.eval(), batch) == first


@pytest.mark.parametrize("method", BY_TOKEN)
def test_the_loss_on_policy_is_the_mean_advantage_and_its_gradient_the_policy_gradient(method: Any) -> None:
    policy = TablePolicy(random_tables())
    module = build(method, policy)
    batch = replace(_rollout(vocabulary=8), advantage=torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.float64))
    rows = module.corrupt(batch)
    outcome = run(module, rows, batch)
    assert batch.advantage is not None
    counted = batch.completion_mask.double()
    weight = counted * batch.advantage[:, None] / counted.sum()
    torch.testing.assert_close(outcome.loss, -weight.sum())
    estimate: Tensor = module.log_likelihood(module.row_log_probs(policy, rows, batch), rows, batch)
    (expected,) = torch.autograd.grad(-(weight * estimate).sum(), policy.W)
    torch.testing.assert_close(outcome.gradient, expected)


@pytest.mark.parametrize("method", BY_SEQUENCE)
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean"])
def test_the_loss_of_sequences_on_policy_is_the_policy_gradient_of_their_elbo(method: Any, aggregation: str) -> None:
    policy = _table(method)
    module = build(method, policy, aggregation=aggregation)
    batch = replace(_rollout(vocabulary=8), advantage=torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.float64))
    rows = module.corrupt(batch)
    outcome = run(module, rows, batch)
    assert batch.advantage is not None
    length = batch.completion_mask.sum(-1).double()
    share = length / length.sum() if aggregation == "token_mean" else torch.full((4,), 0.25, dtype=torch.float64)
    torch.testing.assert_close(outcome.loss, -(share * batch.advantage).sum())
    draws = module.log_likelihood(module.row_log_probs(policy, rows, batch), rows, batch)
    (expected,) = torch.autograd.grad(-(share * batch.advantage * draws.mean(-1) / length).sum(), policy.W)
    torch.testing.assert_close(outcome.gradient, expected)


@online
def test_a_single_update_needs_no_stored_old_policy(method: Any) -> None:
    module = build(method, _table(method))
    batch = replace(_rollout(vocabulary=8), advantage=torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.float64))
    rows = module.corrupt(batch)
    stored = module.freeze_policies(batch, inner_epochs=1, keep_old=True)
    assert module.freeze_policies(batch, inner_epochs=1, keep_old=False).old_log_probs is None
    with_old, without = run(module, rows, stored), run(module, rows, batch)
    torch.testing.assert_close(with_old.loss, without.loss)
    torch.testing.assert_close(with_old.gradient, without.gradient)


def test_a_fully_hidden_d1_row_is_the_last_row_of_the_discrete_elbo() -> None:
    policy = TablePolicy(random_tables())
    module = build(D1, policy, prompt_mask_probability=0.0)
    batch = _rollout(vocabulary=8)
    rows = module.corrupt(batch)
    scored = module.log_likelihood(module.frozen_log_probs(policy, rows, batch), rows, batch)
    coupled = build(CoupledGRPO, policy)
    full = coupled.corrupt(batch).select(slice(0, 1))
    torch.testing.assert_close(scored, coupled.frozen_log_probs(policy, full, batch)[:, 0])


@online
@pytest.mark.parametrize("shape", ["no_end", "end_at_once", "one_token", "nothing_counts"])
def test_odd_completions_give_a_finite_loss_and_gradient(method: Any, shape: str) -> None:
    policy = _table(method)
    module = build(method, policy, **({} if method is SPG else {"kl_coef": 0.1, "dual_clip": 3.0}))
    batch = _rollout(vocabulary=8)
    completion = batch.response_mask.clone()
    if shape == "end_at_once":
        completion &= completion.cumsum(-1) == 1
    if shape == "nothing_counts":
        completion[:] = False
    if shape == "one_token":
        batch = replace(batch, response_mask=batch.response_mask & (batch.response_mask.cumsum(-1) == 1))
        completion = batch.response_mask
    batch = replace(batch, completion_mask=completion, advantage=torch.zeros(4))
    old = partial(torch.full_like, fill_value=-1000.0)
    for advantage in (0.0, 1.0, -1.0):
        rows = module.corrupt(batch)
        scored = module.frozen_log_probs(policy, rows, batch)
        filled = replace(
            batch,
            advantage=torch.full((4,), advantage),
            old_log_probs=(old(scored) * rows.score_mask)[:, None],
            ref_log_probs=(old(scored) * rows.score_mask)[:, None],
        )
        outcome = run(module, rows, filled)
        assert outcome.loss.isfinite()
        assert outcome.gradient.isfinite().all()


@online
def test_equal_rewards_teach_nothing(method: Any) -> None:
    module = build(method, _table(method))
    batch = replace(_rollout(vocabulary=8), advantage=module.advantages(torch.full((1, 4), 0.1)).flatten())
    outcome = run(module, module.corrupt(batch), batch)
    assert float(outcome.loss) == 0
    assert float(outcome.gradient.abs().max()) == 0
