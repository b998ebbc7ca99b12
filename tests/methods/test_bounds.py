"""Methods on bounds of the likelihood: what they refuse, what they run, and what they report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dare_lightning.families.adapters import LoRA
from dare_lightning.methods.bgpo import BGPO
from dare_lightning.methods.ebpo import EBPO
from dare_lightning.methods.espo import ESPO
from dare_lightning.methods.spg import SPG
from dare_lightning.methods.vrpo import VRPO
from dare_lightning.replay.batch import SequenceBatch
from tests.methods.harness import build, run
from tests.methods.table_model import TablePolicy, random_tables, sequence_batch
from tests.tiny import tiny_llada


def _batch(**columns: Any) -> SequenceBatch:
    ids = torch.randint(0, 8, (4, 14), generator=torch.Generator().manual_seed(5))
    advantage = torch.tensor([1.0, -1.0, 0.5, -0.5], dtype=torch.float64)
    batch: SequenceBatch = sequence_batch(ids, 4, advantage=advantage, **columns)
    return batch


def _pairs() -> SequenceBatch:
    return _batch(group_index=torch.tensor([0, 0, 1, 1]), reward=torch.tensor([1.0, 0.0, 0.0, 1.0]))


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        (ESPO, {"samples": 3}, "method.samples=3 is odd, but rows come in complementary pairs; use 4"),
        (ESPO, {"kl_kind": "k1"}, "method.kl_kind='k1' cannot serve as a loss"),
        (BGPO, {"samples": 0}, "method.samples=0 must be at least 1"),
        (BGPO, {"level_scope": "block"}, "level_scope=block needs a block-diffusion policy, TablePolicy has no blocks"),
        (BGPO, {"length_divisor": 0.0}, "method.length_divisor=0.0 must be a finite number above 0"),
        (BGPO, {"aggregation": "sequence_sum_token_sum_norm"}, "aggregation='sequence_sum_token_sum_norm'"),
        (SPG, {"kl_coef": 0.1}, "SPG has no reference"),
        (SPG, {"upper": "both"}, "method.upper='both'; choose one of mix, eubo, elbo"),
        (SPG, {"min_t": 0.9, "max_t": 0.1}, "not ordered inside"),
        (SPG, {"prompt_mask_probability": 1.5}, "outside"),
        (VRPO, {"kl_coef": 0.1}, "method.beta sets VRPO's divergence"),
        (VRPO, {"beta": 0.0}, "method.beta=0.0 must be above 0"),
    ],
)
def test_settings_without_meaning_are_refused(method: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(method, TablePolicy(random_tables()), **settings)


@pytest.mark.parametrize("method", [BGPO, VRPO])
def test_the_levels_of_a_sequence_are_spread_evenly_over_its_rows(method: Any) -> None:
    module = build(method, TablePolicy(random_tables()), samples=5)
    hidden = (module.corrupt(_batch()).noisy_ids == module.policy.mask_token_id).sum(-1)  # of 10 tokens
    assert all(counts.sort().values.diff().tolist() == [2] * 4 for counts in hidden)


def test_timestep_weights_must_be_one_for_each_row() -> None:
    policy = TablePolicy(random_tables(), block_length=4)
    with pytest.raises(ValueError, match="must be 3 numbers of at least 0"):
        build(EBPO, policy, samples=3, timestep_weights=[0.5, 0.5])


def test_a_pair_of_rows_hides_every_counted_token_exactly_once() -> None:
    module = build(ESPO, TablePolicy(random_tables()), samples=6)
    batch = _batch()
    batch = replace(batch, completion_mask=batch.response_mask & (torch.arange(14) < 11))
    hidden = module.corrupt(batch).noisy_ids == module.policy.mask_token_id
    once = hidden.unflatten(1, (3, 2)).sum(2)
    assert torch.equal(once.bool(), batch.completion_mask[:, None].expand_as(once))
    assert once.max() == 1


def test_a_policy_gradient_without_ratio_never_scores_the_old_policy() -> None:
    policy = TablePolicy(random_tables())
    module = build(SPG, policy, block_length=4)
    frozen = module.freeze_policies(_batch(), inner_epochs=3, keep_old=True)
    assert frozen.old_log_probs is None
    assert frozen.ref_log_probs is None


def test_spg_hides_what_follows_the_end_and_scores_only_what_counts() -> None:
    module = build(SPG, TablePolicy(random_tables()), block_length=4, samples=5)
    batch = _batch()
    batch = replace(batch, completion_mask=batch.response_mask & (torch.arange(14) < 9))
    rows = module.corrupt(batch)
    after = batch.response_mask & ~batch.completion_mask
    assert (rows.noisy_ids == module.policy.mask_token_id)[after[:, None].expand_as(rows.noisy_ids)].all()
    assert not (rows.score_mask & ~batch.completion_mask[:, None]).any()
    assert rows.score_mask.any(-1).all()


def test_the_spread_of_the_estimate_is_reported_where_a_sequence_has_several_draws() -> None:
    for method, settings in ((BGPO, {"samples": 4}), (ESPO, {"samples": 4}), (SPG, {"block_length": 4})):
        module = build(method, TablePolicy(random_tables()), **settings)
        assert run(module, module.corrupt(_batch()), _batch()).metrics["estimator_std"] > 0
    module = build(ESPO, TablePolicy(random_tables()), samples=2)
    assert "estimator_std" not in run(module, module.corrupt(_batch()), _batch()).metrics


@pytest.mark.parametrize("adapter", [False, True], ids=["copy", "adapter"])
def test_preferences_start_at_a_margin_of_zero_and_move_apart(adapter: bool) -> None:
    policy: Any = tiny_llada()
    if adapter:
        LoRA(rank=4, alpha=8.0).apply(policy)
    module = build(VRPO, policy, samples=2)
    module.train()
    batch = _pairs()
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(3):
        rows = module.corrupt(batch)
        counted = replace(batch, denominator=module.denominator(rows, batch))
        loss, metrics = module.loss_and_metrics(rows, counted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((float(loss.detach()), float(metrics["margin"][0])))
    assert losses[0] == (pytest.approx(torch.log(torch.tensor(2.0)).item()), pytest.approx(0, abs=1e-5))
    assert losses[2][0] < losses[1][0] < losses[0][0]
    assert losses[2][1] > losses[1][1] > 0


def test_the_gradient_at_the_start_is_half_beta_times_the_difference_of_elbos() -> None:
    policy = TablePolicy(random_tables())
    module = build(VRPO, policy, beta=0.3, samples=3)
    batch = _pairs()
    rows = module.corrupt(batch)
    outcome = run(module, rows, batch)
    elbo = module.log_likelihood(module.row_log_probs(policy, rows, batch), rows, batch).mean(-1)
    apart = (elbo[0] - elbo[1] + elbo[3] - elbo[2]) / 2
    (expected,) = torch.autograd.grad(-0.3 / 2 * apart, policy.W)
    torch.testing.assert_close(outcome.gradient, expected)


def test_preferences_without_a_reference_are_refused() -> None:
    module = VRPO(policy=TablePolicy(random_tables()), optimizer=torch.optim.SGD)
    batch = _pairs()
    with pytest.raises(RuntimeError, match="no reference policy was kept"):
        run(module, module.corrupt(batch), batch)
    rows = module.corrupt(batch)
    scored = module.log_likelihood(module.row_log_probs(module.policy, rows, batch), rows, batch)
    with pytest.raises(ValueError, match="compares with a reference and has none"):
        module.policy_loss(scored, scored, None, rows, batch)


def test_both_answers_of_a_pair_draw_their_own_noise_that_policy_and_reference_share() -> None:
    module = build(VRPO, TablePolicy(random_tables()), samples=4)
    batch = replace(_pairs(), ids=_pairs().ids[:1].expand(4, -1).contiguous())
    noisy = module.corrupt(batch).noisy_ids
    assert not torch.equal(noisy[0], noisy[1])
    assert run(module, module.corrupt(batch), batch).metrics["margin"] == pytest.approx(0, abs=1e-12)
