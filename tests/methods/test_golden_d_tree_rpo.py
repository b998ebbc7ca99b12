"""Loss, advantages, log-probs and gradient of d-TreeRPO against the recorded implementation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dare_lightning.diffusion.rows import Rows
from dare_lightning.methods.d_tree_rpo import DTreeRPO
from dare_lightning.replay.batch import SequenceBatch
from tests.methods.harness import build, run, with_old
from tests.methods.table_model import golden, sequence_batch
from tests.methods.trajectories import double, table
from tests.shared import golden_files

CASES = golden_files("algorithms/dtreerpo_*.json")


class Case(NamedTuple):
    file: dict[str, Any]
    module: DTreeRPO
    rows: Rows
    batch: SequenceBatch


def _case(path: Path, **more: Any) -> Case:
    """The recorded segments as trees of one level: what the parent knows is the prompt of its children."""
    case = golden(path)
    config, inputs = case["config"], case["inputs"]
    parent, child = torch.tensor(inputs["parent_ids"]), torch.tensor(inputs["child_ids"])
    mask_id = case["model"]["mask_id"]
    values = double(inputs["sibling_values"])
    batch = sequence_batch(child, 0, group_index=torch.tensor(inputs["group_ids"]), reward=values)
    written = (parent == mask_id) & (child != mask_id)
    batch = replace(
        batch,
        response_mask=parent == mask_id,
        commit_step=torch.where(written, 0, -1),
        node_index=torch.arange(len(child))[:, None],
    )

    class During(DTreeRPO):
        """At the recorded step of the run."""

        progress = config["global_step"] / config["max_steps"]

    module = build(
        During,
        table(case),
        denoising_steps=1,
        clip_low=config["clip_eps"],
        clip_high=config["clip_eps"],
        kl_coef=config["kl_coef"],
        distillation=config["lambda_max"] if config["self_distillation"] else 0.0,
        distillation_growth=config["gamma"],
        target_temperature=config["tau_max"],
        target_decay=config["tau_beta"],
        **more,
    )
    batch = module.credit(batch)
    rows = module.corrupt(batch)
    ref = table(case, "W_ref") if module.kl_coef > 0 else None
    return Case(case, module, rows, with_old(module, rows, batch, table(case, "W_old"), ref))


@pytest.mark.parametrize("plan", ["single", "accumulate"])
@pytest.mark.parametrize("path", CASES)
def test_loss_and_gradient_are_the_recorded_ones(path: Path, plan: str) -> None:
    case = _case(path, gradient_plan=plan)
    outcome = run(case.module, case.rows, case.batch)
    torch.testing.assert_close(outcome.loss, double(case.file["outputs"]["loss"]), **case.file["tolerance"])
    torch.testing.assert_close(outcome.gradient, double(case.file["outputs"]["grad_W"]), **case.file["tolerance"])


@pytest.mark.parametrize("path", CASES)
def test_advantages_and_active_tokens_are_the_recorded_ones(path: Path) -> None:
    case = _case(path)
    outputs, start = case.file["outputs"], case.file["inputs"]["prompt_length"]
    assert case.batch.step_advantage is not None
    expected = double(outputs["local_advantages"])
    torch.testing.assert_close(case.batch.step_advantage[:, 0], expected, **case.file["tolerance"])
    assert torch.equal(case.rows.score_mask[:, 0, start:].long(), torch.tensor(outputs["active_mask"]))
    assert torch.equal(case.rows.noisy_ids[:, 0], torch.tensor(case.file["inputs"]["parent_ids"]))


@pytest.mark.parametrize("path", CASES)
def test_log_probs_of_all_policies_are_the_recorded_ones(path: Path) -> None:
    case = _case(path)
    start = case.file["inputs"]["prompt_length"]
    for name, weights in (("policy", "W"), ("old", "W_old"), ("ref", "W_ref")):
        scored = case.module.frozen_log_probs(table(case.file, weights), case.rows, case.batch)[:, 0, start:]
        expected = double(case.file["outputs"][f"{name}_logps"])
        torch.testing.assert_close(scored, expected, **case.file["tolerance"], msg=name)
