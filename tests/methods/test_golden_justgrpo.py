"""Loss, token log-probs and gradient of JustGRPO against the recorded implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dare_lightning.diffusion.rows import Rows
from dare_lightning.methods.justgrpo import JustGRPO
from dare_lightning.replay.batch import SequenceBatch
from tests.methods.harness import build, run
from tests.methods.table_model import TablePolicy, golden, random_tables, sequence_batch
from tests.methods.trajectories import double, table
from tests.shared import golden_files

CASES = golden_files("algorithms/justgrpo_*.json")


class Case(NamedTuple):
    file: dict[str, Any]
    module: JustGRPO
    rows: Rows
    batch: SequenceBatch


def _case(path: Path, **more: Any) -> Case:
    case = golden(path)
    config, inputs = case["config"], case["inputs"]
    rewards = double(inputs["rewards"])
    group = torch.arange(len(rewards)) // inputs["group_size"]
    batch = sequence_batch(inputs["input_ids"], inputs["prompt_length"], reward=rewards, group_index=group)
    settings = {"clip_low": config["clip_eps"], "clip_high": config["clip_eps"], "temperature": config["temperature"]}
    module = build(JustGRPO, table(case), count_after_eos=True, **settings, **more)
    batch = module.credit(batch)
    return Case(case, module, module.corrupt(batch), batch)


@pytest.mark.parametrize(("plan", "rows_per_forward"), [("single", None), ("accumulate", 1), ("replay", 3)])
@pytest.mark.parametrize("path", CASES)
def test_loss_and_gradient_are_the_recorded_ones(path: Path, plan: str, rows_per_forward: int | None) -> None:
    case = _case(path, gradient_plan=plan, rows_per_forward=rows_per_forward)
    room = case.batch.length - case.file["inputs"]["prompt_length"]
    # Recorded with 1e-5 added to the number of answers with an advantage.
    total = case.module.denominator(case.rows, case.batch) + 1e-5 * room
    outcome = run(case.module, case.rows, case.batch, total)
    torch.testing.assert_close(outcome.loss, double(case.file["outputs"]["loss"]), **case.file["tolerance"])
    torch.testing.assert_close(outcome.gradient, double(case.file["outputs"]["grad_W"]), **case.file["tolerance"])


@pytest.mark.parametrize("path", CASES)
def test_advantages_and_token_log_probs_are_the_recorded_ones(path: Path) -> None:
    case = _case(path)
    outputs, start = case.file["outputs"], case.file["inputs"]["prompt_length"]
    assert case.batch.advantage is not None
    torch.testing.assert_close(case.batch.advantage, double(outputs["advantages"]), **case.file["tolerance"])
    taught = case.batch.advantage != 0
    scored = case.module.frozen_log_probs(table(case.file), case.rows, case.batch)
    got = case.module.log_likelihood(scored, case.rows, case.batch)[:, start:]
    torch.testing.assert_close(got[taught], double(outputs["policy_logps"])[taught], **case.file["tolerance"])


def test_a_token_sees_what_stands_before_it() -> None:
    module = build(JustGRPO, TablePolicy(random_tables()))
    batch = sequence_batch([[1, 2, 3, 4, 5]], 2)
    mask = module.policy.mask_token_id
    rows = module.corrupt(batch)
    assert rows.noisy_ids[0].tolist() == [[1, 2, mask, mask, mask], [1, 2, 3, mask, mask], [1, 2, 3, 4, mask]]
    assert rows.score_mask[0, :, 2:].long().tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
