"""What must not change an update: micro-batches, row order, padding, and the gradient plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dare_lightning.methods.bgpo import BGPO
from dare_lightning.methods.coupled_grpo import CoupledGRPO
from dare_lightning.methods.d1 import D1
from dare_lightning.methods.ebpo import EBPO
from dare_lightning.methods.espo import ESPO
from dare_lightning.methods.sft import NORMALIZATIONS, SFT
from dare_lightning.methods.spg import SPG
from dare_lightning.methods.vrpo import VRPO
from dare_lightning.replay.batch import TOKEN_COLUMNS, SequenceBatch
from tests.methods.harness import Outcome, build, run, run_split
from tests.methods.table_model import TablePolicy, random_tables, sequence_batch

BLOCKS = 4
"""Tokens a block of the policy, where a case has one."""

# name -> the method, its settings, and the policy's block length.
CASES: dict[str, tuple[Any, dict[str, Any], int | None]] = {
    **{f"sft_{n}": (SFT, {"normalization": n, "samples": 2}, None) for n in NORMALIZATIONS},
    "sft_tied": (SFT, {"tie_trailing_eos": True}, None),
    "d1": (D1, {"kl_coef": 0.1}, None),
    "d1_dual_clip": (D1, {"dual_clip": 1.5, "count_after_eos": True}, None),
    "d1_by_sequence": (D1, {"aggregation": "sequence_mean_token_mean"}, None),
    "d1_dr_grpo": (D1, {"aggregation": "dr_grpo"}, None),
    "coupled": (CoupledGRPO, {"kl_coef": 0.1}, None),
    "coupled_normalized": (
        CoupledGRPO,
        {"normalize_coupled_weights": True, "aggregation": "sequence_mean_token_sum"},
        None,
    ),
    "spg": (SPG, {"block_length": 4, "samples": 3}, None),
    "spg_upper_bound": (SPG, {"block_length": 5, "samples": 2, "upper": "eubo", "count_after_eos": True}, None),
    "spg_random": (SPG, {"forward_type": "random", "samples": 2, "min_t": 0.2, "max_t": 0.9}, None),
    "bgpo": (BGPO, {"samples": 4, "kl_coef": 0.1}, None),
    "bgpo_blocks": (BGPO, {"samples": 3, "level_scope": "block", "length_divisor": 8.0, "dual_clip": 1.5}, BLOCKS),
    "ebpo": (EBPO, {"samples": 3, "kl_coef": 0.1}, BLOCKS),
    "ebpo_raw": (EBPO, {"samples": 2, "timestep_weights": [0.7, 0.3], "length_divisor": 1.0}, BLOCKS),
    "espo": (ESPO, {"samples": 4, "kl_coef": 0.1}, None),
    "espo_blocks": (ESPO, {"samples": 2, "aggregation": "token_mean"}, BLOCKS),
    "espo_single": (ESPO, {"samples": 3, "complement": False}, None),
    "vrpo": (VRPO, {"samples": 3}, None),
    "vrpo_blocks": (VRPO, {"samples": 2, "level_scope": "block", "length_divisor": None, "sft_coef": 0.1}, BLOCKS),
}

every_case = pytest.mark.parametrize(("method", "settings", "blocks"), CASES.values(), ids=CASES.keys())

# Means over what was scored together, and not sums.
NOT_ADDITIVE = ("ratio_max", "estimator_std")


def _batch() -> SequenceBatch:
    """Four samples of very different lengths, two pairs; what follows the first end token (9) does not count."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 8, (4, 16), generator=draw)
    ids[1, 9:12] = 9
    exists = torch.arange(16) < torch.tensor([6, 12, 16, 9])[:, None]
    completion = exists & (torch.arange(16) >= torch.tensor([3, 4, 2, 8])[:, None])
    completion[1, 10:] = False
    return sequence_batch(
        ids,
        torch.tensor([3, 4, 2, 8]),
        exists,
        completion_mask=completion,
        advantage=torch.tensor([1.0, -0.5, 0.25, -2.0], dtype=torch.float64),
        group_index=torch.tensor([0, 0, 1, 1]),
        reward=torch.tensor([1.0, 0.0, 0.0, 1.0]),
    )


def _module(method: Any, settings: dict[str, Any], blocks: int | None = None, **more: Any) -> tuple[Any, SequenceBatch]:
    """A policy that is off its old policy and its reference, and a batch that knows both."""
    model = random_tables()
    module = build(method, TablePolicy(model, block_length=blocks), **settings, **more)
    batch = _batch()
    old, ref = TablePolicy(model, "W_old", blocks), TablePolicy(model, "W_ref", blocks)
    for table in (old, ref):  # close enough for some ratios to stay unclipped
        table.W.data = 0.9 * module.policy.W.data + 0.1 * table.W.data
    rows = module.corrupt(batch)
    if module.online and module.uses_old_policy:
        batch = replace(batch, old_log_probs=module.frozen_log_probs(old, rows, batch)[:, None])
    if module.needs_reference:
        batch = replace(batch, ref_log_probs=module.frozen_log_probs(ref, rows, batch)[:, None])
    return module, batch


def _assert_same(got: Outcome, expected: Outcome) -> None:
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got.gradient, expected.gradient, rtol=1e-10, atol=1e-12)
    assert float(expected.gradient.abs().max()) > 0


def _padded(batch: SequenceBatch, left: int, right: int) -> SequenceBatch:
    columns: dict[str, Any] = {
        name: torch.nn.functional.pad(value, (left, right), value=TOKEN_COLUMNS[name])
        for name, value in batch.columns()
        if name in TOKEN_COLUMNS
    }
    return replace(batch, **columns)


@every_case
@pytest.mark.parametrize("parts", [[[0], [1], [2], [3]], [[0, 1], [2, 3]], [[3, 1, 0], [2]], [[3, 2], [1, 0]]])
def test_micro_batches_and_their_order_do_not_change_the_update(
    method: Any, settings: Any, blocks: int | None, parts: Any
) -> None:
    module, batch = _module(method, settings, blocks)
    split = [torch.tensor(part) for part in parts]
    if module.compares_pairs and any(len(part) != 2 for part in parts):
        with pytest.raises(ValueError, match="both answers of a pair must be in one micro-batch"):
            run_split(module, batch, split)
        return
    _assert_same(run_split(module, batch, split), run(module, module.corrupt(batch), batch))


@every_case
@pytest.mark.parametrize(("left", "right"), [(0, 5), (4, 0), (3, 2)])
def test_padding_does_not_change_the_update(
    method: Any, settings: Any, blocks: int | None, left: int, right: int
) -> None:
    module, batch = _module(method, settings, blocks)
    padded = _padded(batch, left, right)
    _assert_same(run(module, module.corrupt(padded), padded), run(module, module.corrupt(batch), batch))


@every_case
@pytest.mark.parametrize("plan", ["accumulate", "replay"])
@pytest.mark.parametrize("rows_per_forward", [1, 2, None])
def test_gradient_plans_agree(
    method: Any, settings: Any, blocks: int | None, plan: str, rows_per_forward: int | None
) -> None:
    if plan == "accumulate" and not method.additive_rows:
        with pytest.raises(ValueError, match="accumulate needs a loss that is a sum over rows.*replay"):
            _module(method, settings, blocks, gradient_plan=plan)
        return
    module, batch = _module(method, settings, blocks)
    expected = run(module, module.corrupt(batch), batch)
    planned, batch = _module(method, settings, blocks, gradient_plan=plan, rows_per_forward=rows_per_forward)
    got = run(planned, planned.corrupt(batch), batch)
    _assert_same(got, expected)
    for name, value in expected.metrics.items():
        if plan == "replay" or name not in NOT_ADDITIVE:
            assert got.metrics[name] == pytest.approx(value, rel=1e-9), name


def test_token_normalised_fine_tuning_weighs_tokens_and_not_micro_batches() -> None:
    module, batch = _module(SFT, {"normalization": "token"})
    pieces = [batch.select(torch.tensor([0])), batch.select(torch.tensor([2]))]
    both = batch.select(torch.tensor([0, 2]))
    sums = [run(module, module.corrupt(p), p, torch.ones(1)).loss for p in pieces]
    expected = sum(sums) / (3 + 14)
    torch.testing.assert_close(run(module, module.corrupt(both), both).loss, expected)
