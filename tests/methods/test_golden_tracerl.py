"""Loss, rows and gradient of TraceRL against the recorded implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dare_lightning.diffusion.rows import Rows
from dare_lightning.methods.tracerl import TraceRL
from dare_lightning.replay.batch import SequenceBatch
from tests.methods.harness import build, run, with_old
from tests.methods.table_model import golden
from tests.methods.trajectories import assert_recorded, committed_batch, double, table
from tests.shared import golden_files

CASES = golden_files("algorithms/tracerl_*.json")


class Case(NamedTuple):
    file: dict[str, Any]
    module: TraceRL
    rows: Rows
    batch: SequenceBatch


def _case(path: Path, **more: Any) -> Case:
    case = golden(path)
    config, inputs = case["config"], case["inputs"]
    if "block_size" in config:
        # Prompt tokens equal to the padding are not visible in this layout.
        ids, start = torch.tensor(inputs["input_ids"]), inputs["prompt_length"]
        hidden = (ids == case["model"]["pad_id"]) & (torch.arange(ids.shape[1]) < start)
        inputs = inputs | {"attention_mask": (~hidden).long().tolist()}
    advantages = double(inputs["advantages"])
    batch = committed_batch(inputs, advantage=advantages, block_origin="response")
    settings = {"clip_low": config["clip_eps"], "clip_high": config["clip_eps"], "kl_coef": config["kl_coef"]}
    module = build(TraceRL, table(case), shrink=config["shrink"], sum_kl=True, count_after_eos=True, **settings, **more)
    rows = module.corrupt(batch)
    return Case(case, module, rows, with_old(module, rows, batch, table(case, "W_old")))


@pytest.mark.parametrize(("plan", "rows_per_forward"), [("single", None), ("accumulate", 1)])
@pytest.mark.parametrize("path", CASES)
def test_loss_and_gradient_are_the_recorded_ones(path: Path, plan: str, rows_per_forward: int | None) -> None:
    case = _case(path, gradient_plan=plan, rows_per_forward=rows_per_forward)
    outcome = run(case.module, case.rows, case.batch)
    torch.testing.assert_close(outcome.loss, double(case.file["outputs"]["loss"]), **case.file["tolerance"])
    torch.testing.assert_close(outcome.gradient, double(case.file["outputs"]["grad_W"]), **case.file["tolerance"])


@pytest.mark.parametrize("path", CASES)
def test_rows_are_the_recorded_ones(path: Path) -> None:
    case = _case(path)
    outputs, start = case.file["outputs"], case.file["inputs"]["prompt_length"]
    used = case.rows.score_mask.any(-1)
    assert torch.equal(case.rows.score_mask[used][:, start:].long(), torch.tensor(outputs["rows_loss_mask"]))
    noisy = torch.tensor(outputs.get("rows_noisy_input_ids", outputs.get("rows_extended_input_ids")))
    response = case.rows.noisy_ids.shape[-1] - start
    assert torch.equal(case.rows.noisy_ids[used][:, start:], noisy[:, -response:])


@pytest.mark.parametrize("path", CASES)
def test_log_probs_of_the_rows_are_the_recorded_ones(path: Path) -> None:
    case = _case(path)
    start = case.file["inputs"]["prompt_length"]
    for name, weights in (("policy_logps", "W"), ("old_logps", "W_old")):
        assert_recorded(case.module, case.file, name, weights, case.rows, case.batch, start)
