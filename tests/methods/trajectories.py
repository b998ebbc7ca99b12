"""Batches of the golden files of methods on the rollout's own steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dare_lightning.diffusion.rows import Rows
from dare_lightning.replay.batch import SequenceBatch
from tests.methods.table_model import TablePolicy, sequence_batch


def double(value: Any) -> Tensor:
    """A recorded number or list as float64."""
    return torch.tensor(value, dtype=torch.float64)


def after_prompt(column: Any, prompt_length: int, filler: float = 0) -> Tensor:
    """A recorded column [..., R] of the response, with `filler` before it."""
    return torch.nn.functional.pad(torch.as_tensor(column), (prompt_length, 0), value=filler)


def committed_batch(inputs: dict[str, Any], **columns: Any) -> SequenceBatch:
    """The batch of a file with final tokens (or states, the last of which they are) and the step of each."""
    ids = inputs["input_ids"] if "input_ids" in inputs else torch.tensor(inputs["states"])[:, -1]
    start = inputs["prompt_length"]
    columns["commit_step"] = after_prompt(inputs["step_map"], start, -1)
    batch: SequenceBatch = sequence_batch(ids, start, inputs.get("attention_mask"), **columns)
    return batch


def table(case: dict[str, Any], name: str = "W") -> TablePolicy:
    """A policy of the file, with its blocks."""
    return TablePolicy(case["model"], name, case["config"].get("block_size"))


def assert_recorded(
    module: Any, case: dict[str, Any], name: str, weights: str, rows: Rows, batch: SequenceBatch, start: int = 0
) -> None:
    """Row log-probs under a policy of the file equal the recorded ones of the rows that score something."""
    scored = module.frozen_log_probs(table(case, weights), rows, batch)
    used = rows.score_mask.any(-1)
    torch.testing.assert_close(scored[used][:, start:], double(case["outputs"][name]), **case["tolerance"], msg=name)
