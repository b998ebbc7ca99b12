"""Settings of the methods: what they do, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dare_lightning.methods.coupled_grpo import CoupledGRPO
from dare_lightning.methods.d1 import D1
from dare_lightning.methods.sft import SFT
from dare_lightning.replay.batch import SequenceBatch
from tests.methods.harness import build
from tests.methods.table_model import TablePolicy, random_tables, sequence_batch


@pytest.fixture
def policy() -> TablePolicy:
    return TablePolicy(random_tables())


@pytest.fixture
def batch() -> SequenceBatch:
    """Responses of 6 tokens of which the last two come after the end."""
    ids = torch.tensor([[8, 1, 2, 3, 4, 5, 9, 9, 9], [1, 2, 3, 4, 5, 6, 9, 9, 9]])
    exists = torch.tensor([[False] + [True] * 8, [True] * 9])
    made: SequenceBatch = sequence_batch(ids, 3, exists, advantage=torch.tensor([1.0, -1.0]))
    completion = made.response_mask & (torch.arange(9) < 7)
    return replace(made, completion_mask=completion)


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        (SFT, {"normalization": "tokens"}, "normalization='tokens'.*sequence, token, batch, masked_tokens"),
        (SFT, {"eps": 1.0}, "method.eps=1.0"),
        (SFT, {"weight_eps": -1e-6}, "weight_eps=-1e-06 is negative"),
        (SFT, {"samples": 0}, "method.samples=0"),
        (SFT, {"validation_levels": 0}, "validation_levels=0"),
        (SFT, {"kl_coef": 0.1}, "no reference"),
        (D1, {"prompt_mask_probability": 1.5}, "prompt_mask_probability=1.5"),
        (D1, {"clip_low": 1.0}, "clip_low=1.0"),
        (D1, {"dual_clip": 0.5}, "dual_clip=0.5"),
        (D1, {"advantage": "mean"}, "'mean' does not exist; choose one of grpo"),
        (D1, {"aggregation": "mean"}, "aggregation='mean'"),
        (CoupledGRPO, {"mask_ratio": [0.0, 0.8]}, r"mask_ratio=\[0.0, 0.8\].*\[0.2, 0.8\]"),
        (CoupledGRPO, {"mask_ratio": [0.8, 0.2]}, "ordered"),
        (CoupledGRPO, {"mask_ratio": [0.5]}, "two ordered numbers"),
        (CoupledGRPO, {"clip_high": -1.0}, "clip_high=-1.0"),
        (CoupledGRPO, {"gradient_plan": "accumulate"}, "replay, which is exact"),
    ],
)
def test_settings_out_of_range_are_refused(policy: Any, method: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(method, policy, **settings)


@pytest.mark.parametrize("method", [D1, CoupledGRPO])
def test_tokens_after_the_end_count_only_where_asked(policy: Any, batch: SequenceBatch, method: Any) -> None:
    for after, expected in ((False, 8.0), (True, 12.0)):
        module = build(method, policy, count_after_eos=after)
        assert float(module.denominator(module.corrupt(batch), batch)) == expected


def test_d1_hides_the_whole_response_and_part_of_the_prompt(policy: Any, batch: SequenceBatch) -> None:
    many = batch.select(torch.zeros(400, dtype=torch.long))
    many = replace(many, noise_seed=torch.arange(400))
    rows = build(D1, policy).corrupt(many)
    hidden = rows.noisy_ids[:, 0] == policy.mask_token_id
    assert hidden[many.response_mask].all()
    assert not hidden[~many.attention_mask].any()
    assert hidden[many.prompt_mask].double().mean() == pytest.approx(0.15, abs=0.04)


def test_coupled_rows_score_every_counted_token_twice_with_inverse_weights(policy: Any, batch: SequenceBatch) -> None:
    rows = build(CoupledGRPO, policy).corrupt(batch)
    assert torch.equal(rows.score_mask.sum(1), 2 * batch.completion_mask.long())
    assert not (rows.noisy_ids[:, 1:] == policy.mask_token_id)[batch.prompt_mask[:, None].expand(-1, 2, -1)].any()
    assert rows.level is not None
    torch.testing.assert_close(rows.weight, rows.score_mask / rows.level[..., None])
    equal = build(CoupledGRPO, policy, normalize_coupled_weights=True).corrupt(batch)
    torch.testing.assert_close(equal.weight, equal.score_mask.float())


def test_the_coupled_mask_is_fresh_in_every_sample_and_inner_epoch(policy: Any, batch: SequenceBatch) -> None:
    many = replace(batch.select(torch.zeros(50, dtype=torch.long)), noise_seed=torch.arange(50))
    module = build(CoupledGRPO, policy)
    levels = [module.corrupt(replace(many, iteration=i)).level[:, 1] for i in range(2)]
    assert len(torch.cat(levels).unique()) > 90


def test_fine_tuning_spreads_its_rows_over_the_levels(policy: Any, batch: SequenceBatch) -> None:
    rows = build(SFT, policy, samples=4, eps=0.0).corrupt(batch)
    assert rows.level is not None
    gaps = rows.level.sort(-1).values.diff(dim=-1)
    torch.testing.assert_close(gaps, torch.full_like(gaps, 0.25))


def test_fine_tuning_hides_the_closing_end_tokens_together_where_asked(policy: Any, batch: SequenceBatch) -> None:
    many = replace(batch.select(torch.zeros(60, dtype=torch.long)), noise_seed=torch.arange(60))
    hidden = build(SFT, policy, tie_trailing_eos=True).corrupt(many).noisy_ids[:, 0, 6:] == policy.mask_token_id
    assert set(hidden.sum(-1).tolist()) == {0, 3}
    loose = build(SFT, policy).corrupt(many).noisy_ids[:, 0, 6:] == policy.mask_token_id
    assert set(loose.sum(-1).tolist()) > {0, 3}


def test_validation_rows_depend_on_the_sample_alone(policy: Any, batch: SequenceBatch) -> None:
    module = build(SFT, policy, validation_levels=4, eps=0.0)
    first = module.validation_rows(batch)
    again = module.validation_rows(replace(batch, noise_seed=batch.noise_seed + 7, iteration=3))
    assert torch.equal(first.noisy_ids, again.noisy_ids)
    placed = replace(batch, sample_index=torch.tensor([1, 6]))
    torch.testing.assert_close(module.validation_rows(placed).level, torch.tensor([[0.375], [0.625]]))


def test_fine_tuning_has_no_advantages(policy: Any) -> None:
    with pytest.raises(ValueError, match="no rewards"):
        build(SFT, policy).advantages(torch.zeros(1, 2))


@pytest.mark.parametrize(
    ("method", "settings", "expected"),
    [
        (D1, {}, [0.5, -0.5, -0.5, 0.5]),
        (CoupledGRPO, {}, [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        (D1, {"advantage": "z_score"}, [1.0, -1.0, -1.0, 1.0]),
    ],
)
def test_advantages_are_the_papers_by_default(policy: Any, method: Any, settings: Any, expected: list[float]) -> None:
    got = build(method, policy, **settings).advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0]]))
    torch.testing.assert_close(got, torch.tensor([expected]))
