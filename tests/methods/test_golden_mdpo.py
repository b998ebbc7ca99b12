"""Loss, log-probs and gradient of MDPO against the recorded implementations, and the credit it gives to steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dare_lightning.diffusion.rows import Rows
from dare_lightning.methods.mdpo import MDPO
from dare_lightning.replay.batch import SequenceBatch
from tests.methods.harness import Outcome, build, run, with_old
from tests.methods.table_model import golden, sequence_batch
from tests.methods.trajectories import after_prompt, double, table
from tests.shared import golden_files

CASES = [*golden_files("algorithms/mdpo_original_*.json"), *golden_files("algorithms/mdpo_dare_*.json")]


class Case(NamedTuple):
    file: dict[str, Any]
    module: MDPO
    rows: Rows
    batch: SequenceBatch


def _case(path: Path, **more: Any) -> Case:
    case = golden(path)
    config, inputs = case["config"], case["inputs"]
    start = inputs["prompt_length"]
    batch = sequence_batch(
        inputs["target_ids"],
        start,
        inputs.get("attention_mask"),
        states=torch.tensor(inputs["input_ids"])[:, None],
        proposals=torch.tensor(inputs["target_ids"])[:, None],
        confidence=after_prompt(double(inputs["confidence"]), start)[:, None],
        step_advantage=double(inputs["step_advantages"])[:, None],
    )
    module = build(
        MDPO,
        table(case),
        train_steps=1,
        clip_low=config["clip_eps"],
        clip_high=config["clip_eps"],
        kl_coef=config["kl_coef"],
        temperature=config["temperature"],
        mask_eps=1e-4 if case["variant"] == "original" else 0.0,
        **more,
    )
    rows = module.corrupt(batch)
    ref = table(case, "W_ref") if module.kl_coef > 0 else None
    batch = with_old(module, rows, batch, table(case, "W_old"), ref)
    single = config.get("num_iterations") == 1
    return Case(case, module, rows, replace(batch, old_log_probs=None) if single else batch)


def _run(case: Case) -> Outcome:
    # The original adds 1e-4 to the number of masks.
    extra = 1e-4 if case.file["variant"] == "original" else 0.0
    return run(case.module, case.rows, case.batch, case.module.denominator(case.rows, case.batch) + extra)


@pytest.mark.parametrize("plan", ["single", "accumulate"])
@pytest.mark.parametrize("path", CASES)
def test_loss_and_gradient_are_the_recorded_ones(path: Path, plan: str) -> None:
    case = _case(path, gradient_plan=plan)
    outcome = _run(case)
    torch.testing.assert_close(outcome.loss, double(case.file["outputs"]["loss"]), **case.file["tolerance"])
    torch.testing.assert_close(outcome.gradient, double(case.file["outputs"]["grad_W"]), **case.file["tolerance"])
    if "clip_fraction" in case.file["outputs"]:
        assert outcome.metrics["clip_fraction"] == pytest.approx(case.file["outputs"]["clip_fraction"], rel=1e-8)


@pytest.mark.parametrize("path", CASES)
def test_log_probs_of_all_policies_are_the_recorded_ones(path: Path) -> None:
    case = _case(path)
    start = case.file["inputs"]["prompt_length"]
    masks = torch.tensor(case.file["inputs"]["state_mask"]).bool()
    assert torch.equal(case.rows.score_mask[:, 0, start:], masks)
    old = "W" if case.file["config"].get("num_iterations") == 1 else "W_old"
    for name, weights in (("policy", "W"), ("old", old), ("ref", "W_ref")):
        scored = case.module.frozen_log_probs(table(case.file, weights), case.rows, case.batch)
        got, expected = scored[:, 0, start:][masks], double(case.file["outputs"][f"{name}_logps"])[masks]
        torch.testing.assert_close(got, expected, **case.file["tolerance"], msg=name)
