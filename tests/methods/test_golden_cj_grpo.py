"""Loss and gradient of CJ-GRPO against the recorded implementations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dare_lightning.diffusion.rows import Rows
from dare_lightning.methods.cj_grpo import CJGRPO
from dare_lightning.replay.batch import SequenceBatch
from tests.methods.harness import Outcome, build, run, with_old
from tests.methods.table_model import golden
from tests.methods.trajectories import committed_batch, double, table
from tests.shared import golden_files

CASES = golden_files("algorithms/cj_grpo_*.json")


class Case(NamedTuple):
    file: dict[str, Any]
    module: CJGRPO
    rows: Rows
    batch: SequenceBatch


def _case(path: Path, **more: Any) -> Case:
    case = golden(path)
    config, inputs = case["config"], case["inputs"]
    origin = config.get("block_origin", "global")
    batch = committed_batch(inputs, advantage=double(inputs["advantages"]), block_origin=origin)
    module = build(
        CJGRPO,
        table(case),
        clip_low=config.get("clip_low", config.get("clip_eps")),
        clip_high=config.get("clip_high", config.get("clip_eps")),
        dual_clip=config.get("dual_clip"),
        kl_coef=config.get("kl_coef", 0.0),
        count_after_eos=True,
        aggregation="transition_mean" if "block_size" in config else "step_mean",
        **more,
    )
    rows = module.corrupt(batch)
    ref = table(case, "W_ref") if module.kl_coef > 0 else None
    return Case(case, module, rows, with_old(module, rows, batch, table(case, "W_old"), ref))


def _run(case: Case) -> Outcome:
    total = case.module.denominator(case.rows, case.batch)
    if case.file["variant"] == "mdlm_dare":
        # Recorded with 1e-8 added to the token count of every step.
        total = total + 1e-8 * (total > 0)
    return run(case.module, case.rows, case.batch, total)


@pytest.mark.parametrize(("plan", "rows_per_forward"), [("single", None), ("accumulate", 1), ("replay", 2)])
@pytest.mark.parametrize("path", CASES)
def test_loss_and_gradient_are_the_recorded_ones(path: Path, plan: str, rows_per_forward: int | None) -> None:
    case = _case(path, gradient_plan=plan, rows_per_forward=rows_per_forward)
    outcome = _run(case)
    torch.testing.assert_close(outcome.loss, double(case.file["outputs"]["loss"]), **case.file["tolerance"])
    torch.testing.assert_close(outcome.gradient, double(case.file["outputs"]["grad_W"]), **case.file["tolerance"])


@pytest.mark.parametrize("path", CASES)
def test_token_log_probs_of_all_policies_are_the_recorded_ones(path: Path) -> None:
    case = _case(path)
    start = case.file["inputs"]["prompt_length"]
    for name, weights in (("policy", "W"), ("old", "W_old"), ("ref", "W_ref")):
        if (recorded := case.file["outputs"].get(f"{name}_logps_at_reveal")) is not None:
            scored = case.module.frozen_log_probs(table(case.file, weights), case.rows, case.batch)
            got = case.module.log_likelihood(scored, case.rows, case.batch)[:, start:]
            torch.testing.assert_close(got, double(recorded), **case.file["tolerance"], msg=name)


@pytest.mark.parametrize("path", CASES)
def test_states_are_rebuilt_from_the_steps(path: Path) -> None:
    case = _case(path)
    if (recorded := case.file["inputs"].get("states")) is None:
        assert case.rows.count == int(case.module.steps(case.batch).max()) + 1
        return
    assert torch.equal(case.rows.noisy_ids, torch.tensor(recorded)[:, :-1])


@pytest.mark.parametrize("path", CASES)
def test_losses_of_steps_and_weights_of_tokens_are_the_recorded_ones(path: Path) -> None:
    case = _case(path)
    outputs, start = case.file["outputs"], case.file["inputs"]["prompt_length"]
    if "token_weights" in outputs:
        weight = case.module.shares(case.batch).weight[:, start:]
        torch.testing.assert_close(weight, double(outputs["token_weights"]), **case.file["tolerance"])
    if "loss_per_step" in outputs:
        count, old = case.rows.count, case.batch.old_log_probs
        assert old is not None
        losses = []
        for n in range(count):
            alone = replace(case.batch, old_log_probs=old[:, :, n : n + 1])
            losses.append(_run(case._replace(rows=case.rows.select(slice(n, n + 1)), batch=alone)).loss * count)
        torch.testing.assert_close(torch.stack(losses), double(outputs["loss_per_step"]), **case.file["tolerance"])
