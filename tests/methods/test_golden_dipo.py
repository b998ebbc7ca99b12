"""Loss, rows and gradient of DiPO against the recorded implementation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dare_lightning.diffusion.rows import Rows
from dare_lightning.methods.dipo import DiPO
from dare_lightning.replay.batch import SequenceBatch
from tests.methods.harness import build, run, with_old
from tests.methods.table_model import golden
from tests.methods.trajectories import assert_recorded, committed_batch, double, table
from tests.shared import golden_files

CASES = golden_files("algorithms/dipo_dapo_*.json")


class Case(NamedTuple):
    file: dict[str, Any]
    module: DiPO
    rows: Rows
    batch: SequenceBatch


def _case(path: Path, **more: Any) -> Case:
    case = golden(path)
    config, inputs = case["config"], case["inputs"]
    group = torch.tensor(inputs.get("group_ids", [0] * len(inputs["rewards"])))
    batch = committed_batch(inputs, reward=double(inputs["rewards"]), group_index=group)
    settings = {name: config[name] for name in ("clip_low", "clip_high", "kl_coef")}
    module = build(DiPO, table(case), advantage="z_score", count_after_eos=True, **settings, **more)
    batch = module.credit(batch)
    rows = module.corrupt(batch)
    ref = table(case, "W_ref") if module.kl_coef > 0 else None
    batch = with_old(module, rows, batch, table(case, "W_old"), ref)
    return Case(case, module, rows, batch if config["old_policy"] == "stored" else replace(batch, old_log_probs=None))


@pytest.mark.parametrize(("plan", "rows_per_forward"), [("single", None), ("accumulate", 1)])
@pytest.mark.parametrize("path", CASES)
def test_loss_and_gradient_are_the_recorded_ones(path: Path, plan: str, rows_per_forward: int | None) -> None:
    case = _case(path, gradient_plan=plan, rows_per_forward=rows_per_forward)
    outcome = run(case.module, case.rows, case.batch)
    total = case.module.denominator(case.rows, case.batch).sum()
    torch.testing.assert_close(outcome.loss, double(case.file["outputs"]["loss"]), **case.file["tolerance"])
    torch.testing.assert_close(outcome.loss * total, double(case.file["outputs"]["loss_sum"]), **case.file["tolerance"])
    torch.testing.assert_close(outcome.gradient, double(case.file["outputs"]["grad_W"]), **case.file["tolerance"])


@pytest.mark.parametrize("path", CASES)
def test_rows_and_advantages_are_the_recorded_ones(path: Path) -> None:
    case = _case(path)
    outputs, start = case.file["outputs"], case.file["inputs"]["prompt_length"]
    used = case.rows.score_mask.any(-1)
    assert torch.equal(case.rows.score_mask[used].long(), torch.tensor(outputs["rows_loss_mask"]))
    hidden = case.rows.noisy_ids[used] == case.module.policy.mask_token_id
    assert torch.equal(hidden.long(), torch.tensor(outputs["rows_mask_indices"]))
    assert not hidden[:, :start].any()
    assert case.batch.advantage is not None
    per_row = case.batch.advantage[:, None].expand_as(used)[used]
    torch.testing.assert_close(per_row, double(outputs["rows_advantage"]), **case.file["tolerance"])


@pytest.mark.parametrize("path", CASES)
def test_log_probs_of_the_rows_are_the_recorded_ones(path: Path) -> None:
    case = _case(path)
    old = "W_old" if case.file["config"]["old_policy"] == "stored" else "W"
    for name, weights in (("policy_logps", "W"), ("old_logps", old), ("ref_logps", "W_ref")):
        assert_recorded(case.module, case.file, name, weights, case.rows, case.batch)
