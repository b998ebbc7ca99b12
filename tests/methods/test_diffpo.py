"""DiFFPO's two states and its weight, by hand: there is no code of its authors to compare with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dare_lightning.methods.diffpo import DiFFPO
from dare_lightning.replay.batch import SequenceBatch
from tests.methods.harness import build, run, with_old
from tests.methods.table_model import TablePolicy, random_tables, sequence_batch

STEPS = torch.tensor([[-1, -1, 2, 0, 1, -1, 1]])


def _batch(**columns: Any) -> SequenceBatch:
    """One answer of five tokens in three steps; an early stop filled one in."""
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7]])
    given = {"commit_step": STEPS, "commit_log_probs": torch.full((1, 7), -2.0, dtype=torch.float64)}
    batch: SequenceBatch = sequence_batch(ids, 2, advantage=torch.tensor([-0.5], dtype=torch.float64), **given)
    return replace(batch, completion_mask=STEPS >= 0, **columns)


def test_the_rows_are_the_prompt_alone_and_the_state_after_the_drawn_step() -> None:
    policy = TablePolicy(random_tables())
    module, mask = build(DiFFPO, policy), policy.mask_token_id
    seen = set()
    for seed in range(12):
        batch = _batch(noise_seed=torch.tensor([seed]))
        rows = module.corrupt(batch)
        early = rows.score_mask[0, 0]
        last = int(STEPS[0, early].max())
        seen.add(last)
        assert torch.equal(early, (STEPS[0] >= 0) & (STEPS[0] <= last))
        assert rows.noisy_ids[0, 0].tolist() == [1, 2] + [mask] * 5
        if last < 2:
            hidden = (STEPS[0] > last) | (torch.arange(7) == 5)
            assert torch.equal(rows.score_mask[0, 1], STEPS[0] > last)
            assert torch.equal(rows.noisy_ids[0, 1], torch.where(hidden, mask, batch.ids[0]))
    assert seen == {0, 1, 2}


def test_the_draw_follows_the_inner_epoch_and_the_seed_alone() -> None:
    module = build(DiFFPO, TablePolicy(random_tables()))
    many = replace(_batch().select(torch.zeros(20, dtype=torch.int64)), noise_seed=torch.arange(20))
    first = module.steps(many)
    assert torch.equal(first[5:9], module.steps(many.select(slice(5, 9))))
    assert not torch.equal(first, module.steps(replace(many, iteration=1)))


@pytest.mark.parametrize("cap", [1.5, 100.0])
def test_the_loss_by_hand(cap: float) -> None:
    policy, old = TablePolicy(random_tables()), TablePolicy(random_tables(), "W_old")
    module = build(DiFFPO, policy, weight_cap=cap, clip_low=0.1, clip_high=0.1)
    batch = _batch()
    rows = module.corrupt(batch)
    batch = with_old(module, rows, batch, old)
    now, before = (module.frozen_log_probs(p, rows, batch).sum(1)[0] for p in (policy, old))
    expected = 0.0
    for place in (STEPS[0] >= 0).nonzero().flatten().tolist():
        ratio = float((now[place] - before[place]).exp())
        weight = min(cap, float((-2.0 - before[place]).exp()))
        expected += weight * max(0.5 * ratio, 0.5 * min(max(ratio, 0.9), 1.1)) / 4
    outcome = run(module, rows, batch)
    assert float(outcome.loss) == pytest.approx(expected, rel=1e-9)
    assert outcome.gradient.any()
    assert (outcome.metrics["off_policy_capped_fraction"] > 0) == (cap == 1.5)


def test_where_the_states_are_those_of_the_rollout_the_weight_is_one() -> None:
    module = build(DiFFPO, TablePolicy(random_tables()))
    batch = _batch()
    rows = module.corrupt(batch)
    true = module.frozen_log_probs(module.policy, rows, batch).sum(1)
    outcome = run(module, rows, replace(batch, commit_log_probs=true))
    assert outcome.metrics["off_policy_weight"] == pytest.approx(1)
    assert float(outcome.loss) == pytest.approx(0.5)


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="weight_cap=0.0 must be a finite number above 0"):
        build(DiFFPO, TablePolicy(random_tables()), weight_cap=0.0)
    with pytest.raises(ValueError, match="DiFFPO is defined for masked policies and TablePolicy is not one"):
        build(DiFFPO, TablePolicy(random_tables(), block_length=4))
