"""Before its first update the policy is its own old policy and its own reference, in the loop as it runs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from dare_lightning.diffusion.rows import Rows
from dare_lightning.methods.coupled_grpo import CoupledGRPO
from dare_lightning.methods.d1 import D1
from dare_lightning.replay.batch import SequenceBatch
from tests.equalities.conftest import Online, Record


class Watched(CoupledGRPO):
    """Remembers what it drew for each sample and inner epoch."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.drawn: dict[tuple[int, int], list[tuple[int, ...]]] = defaultdict(list)

    def corrupt(self, batch: SequenceBatch) -> Rows:
        rows = super().corrupt(batch)
        for seed, ids in zip(batch.noise_seed.tolist(), rows.noisy_ids, strict=True):
            self.drawn[seed, batch.iteration].append(tuple(ids.flatten().tolist()))
        return rows


def _metrics(run: Online) -> Record:
    record = Record()
    run.fit(logger=record)
    return record


@pytest.mark.parametrize("method", [CoupledGRPO, D1])
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("micro_batch", [8, 4, 2], ids=["whole", "halves", "quarters"])
def test_the_first_step_of_a_rollout_has_ratio_one(method: Any, adapter: bool, micro_batch: int) -> None:
    record = _metrics(Online(method=method, adapter=adapter, micro_batch=micro_batch))
    for step in (0, 4):  # of the first and the second rollout
        assert record.series("train/ratio_mean")[step] == pytest.approx(1, abs=1e-5)
        assert record.series("train/ratio_max")[step] == pytest.approx(1, abs=1e-5)
        assert record.series("train/clip_fraction")[step] == 0
        assert record.series("train/old_kl")[step] == pytest.approx(0, abs=1e-9)
    assert record.series("train/kl")[0] == pytest.approx(0, abs=1e-9)
    assert abs(record.series("train/ratio_mean")[1] - 1) > 1e-5
    assert record.series("train/kl")[1] > 1e-9
    assert record.series("train/kl")[4] > 1e-9


@pytest.mark.parametrize("micro_batch", [8, 2])
def test_old_and_new_log_probs_belong_to_the_same_masks(micro_batch: int) -> None:
    run = Online(method=Watched, micro_batch=micro_batch)
    run.fit()
    drawn: Any = run.method.drawn
    assert len(drawn) == 2 * 16 * 2  # rollouts, samples, inner epochs
    for draws in drawn.values():
        assert len(draws) >= 3  # for the old policy, for the denominators, for the update
        assert len(set(draws)) == 1
    seeds = {seed for seed, _ in drawn}
    assert all(drawn[seed, 0][0] != drawn[seed, 1][0] for seed in seeds)


def test_half_precision_keeps_masks_and_denominators() -> None:
    run = Online(dtype=torch.bfloat16, method=Watched)
    record = _metrics(run)
    drawn: Any = run.method.drawn
    assert all(len(set(draws)) == 1 for draws in drawn.values())
    assert record.series("train/ratio_mean")[0] == pytest.approx(1, abs=0.02)
    exact = _metrics(Online())
    assert record.series("train/loss")[0] == pytest.approx(exact.series("train/loss")[0], abs=0.05)
    assert all(p.dtype == torch.bfloat16 for p in run.policy.parameters())


def test_a_single_update_needs_no_second_pass_and_has_ratio_one() -> None:
    run = Online(updates_per_rollout=1, inner_epochs=1)
    record = _metrics(run)
    assert run.data.buffer.batch is not None
    assert run.data.buffer.batch.old_log_probs is None
    assert record.series("train/ratio_mean") == [1.0, 1.0]
    assert min(record.series("train/grad_norm")) > 1e-3


def test_mixed_precision_scores_rollouts_as_updates_do() -> None:
    run = Online()
    record = Record()
    run.precision = "bf16-mixed"
    run.fit(logger=record)
    assert record.series("train/ratio_max")[0] == pytest.approx(1, abs=1e-5)
    assert record.series("train/kl")[0] == pytest.approx(0, abs=1e-9)


def test_dropout_is_off_where_ratios_are_taken() -> None:
    run = Online(adapter=True)
    for module in run.policy.modules():
        if isinstance(module, torch.nn.Identity | torch.nn.Dropout):
            continue
        for name, child in module.named_children():
            if name == "lora_dropout":
                child["default"] = torch.nn.Dropout(0.5)
    assert any(isinstance(module, torch.nn.Dropout) for module in run.policy.modules())
    record = _metrics(run)
    assert record.series("train/ratio_max")[0] == pytest.approx(1, abs=1e-5)


def test_a_learning_rate_below_the_spacing_of_the_weights_is_refused() -> None:
    run = Online(dtype=torch.bfloat16)
    run.method.optimizer = partial(torch.optim.AdamW, lr=5e-7)
    with pytest.raises(ValueError, match="changes only .*bf16-mixed"):
        run.fit()


def test_fixed_data_are_scored_under_the_reference_when_they_are_used() -> None:
    run = Online()
    run.data.setup("fit")
    run.method.keep_reference()
    batch = replace(_answers(run), advantage=torch.zeros(4), denominator=torch.ones(1))
    rows = run.method.corrupt(batch)
    _, before = run.method.loss_and_metrics(rows, batch)
    with torch.no_grad():
        for parameter in run.policy.parameters():
            parameter.mul_(1.1)
    _, after = run.method.loss_and_metrics(rows, batch)
    assert before["kl"][0] == pytest.approx(0, abs=1e-9)
    assert after["kl"][0] > 1e-4


def _answers(run: Online) -> SequenceBatch:
    prompts = run.data.prompts_for(0, 0, 1)
    backend = run.rollout.backend
    backend.update_weights(run.policy, version=0)
    return backend.generate(prompts.ids[:4], prompts.seeds[:4])
