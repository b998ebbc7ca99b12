"""Held-out prompts: what is measured, and the samples to look at."""

from __future__ import annotations

import json
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from dare_lightning.callbacks.validation import HeldOutValidation
from dare_lightning.families.tiny import new_tiny_sdar
from dare_lightning.generation.block import BlockBackend
from dare_lightning.methods.coupled_grpo import CoupledGRPO
from tests.equalities.conftest import Offline, Online, Record, sampler, trainer
from tests.tiny import tiny_llada


def test_metrics_are_means_over_the_held_out_prompts_and_repeat() -> None:
    run, callback = Online(val_prompts=5), HeldOutValidation(sampler(0.0), table_rows=3)
    runner = trainer([callback])
    (first,) = runner.validate(run.method, datamodule=run.data, verbose=False)
    rewards = [row["reward"] for row in callback.results]
    assert len(rewards) == 5
    assert first["val/reward"] == pytest.approx(sum(rewards) / 5)
    solved = sum(row["status"] == "right" for row in callback.results)
    assert first["val/solve_rate"] == pytest.approx(solved / 5)
    assert 0 < first["val/length"] <= 17
    assert runner.validate(run.method, datamodule=run.data, verbose=False) == [first]


def test_samples_are_written_for_every_validation(tmp_path: Path) -> None:
    run = Online(val_prompts=5)
    validation = HeldOutValidation(sampler(0.0), table_rows=3)
    runner = trainer([run.rollout, validation], accumulate_grad_batches=run.data.micro_batches_per_step(1))
    runner.fit(run.method, datamodule=run.data)
    files = sorted((tmp_path / "samples").glob("val-*.jsonl"))
    assert [file.name for file in files] == ["val-00000004.jsonl", "val-00000008.jsonl"]
    rows = [json.loads(line) for line in files[-1].read_text().splitlines()]
    assert len(rows) == 3
    assert rows[0]["step"] == 8
    assert rows[0]["prompt"] == run.data.heldout[0][0].messages[-1]["content"]
    assert {"completion", "answer", "ground_truth", "reward", "status"} <= rows[0].keys()


def test_validation_leaves_training_as_it_was() -> None:
    def weights(*callbacks: L.Callback) -> dict[str, torch.Tensor]:
        run = Online()
        runner = trainer(
            [run.rollout, *callbacks], max_epochs=1, accumulate_grad_batches=run.data.micro_batches_per_step(1)
        )
        runner.fit(run.method, datamodule=run.data)
        return dict(run.policy.state_dict())

    torch.testing.assert_close(weights(HeldOutValidation(sampler(0.7))), weights(), rtol=0, atol=0)


def test_fixed_data_are_left_to_the_method() -> None:
    run, record = Offline(val_count=4), Record()
    run.fit(HeldOutValidation(sampler(0.0)), logger=record, max_epochs=1)
    assert "val/loss" in record.names()
    assert "val/reward" not in record.names()


def test_any_other_module_is_refused() -> None:
    runner = trainer([HeldOutValidation(sampler(0.0))])
    with pytest.raises(ValueError, match="needs a DiffusionPolicyModule, found BoringModel"):
        runner.validate(BoringModel())


def test_a_block_policy_is_answered_by_the_backend_for_blocks() -> None:
    callback = HeldOutValidation(sampler(0.0), block_backend=BlockBackend(max_new_tokens=4))
    for policy, expected in ((tiny_llada(), "BuiltinBackend"), (new_tiny_sdar(1, 16, 2), "BlockBackend")):
        method = CoupledGRPO(policy, torch.optim.SGD)
        callback.setup(trainer([]), method, "fit")
        assert type(callback.backend).__name__ == expected
