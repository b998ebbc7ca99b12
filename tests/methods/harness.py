"""Running a method's hooks on a table policy without a trainer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dare_lightning.diffusion.rows import Rows
from dare_lightning.methods.base import DiffusionPolicyModule
from dare_lightning.replay.batch import SequenceBatch
from tests.methods.table_model import TablePolicy

SGD = partial(torch.optim.SGD, lr=0.1)


class Outcome(NamedTuple):
    """A loss, its gradient with respect to W, and the metrics as quotients."""

    loss: Tensor
    gradient: Tensor
    metrics: dict[str, float]


def build(method: type[DiffusionPolicyModule], policy: Any, **settings: Any) -> Any:
    """The method on this policy; its optimiser is never used."""
    module = method(policy=policy, optimizer=SGD, **settings)
    module.keep_reference()
    return module


def run(module: DiffusionPolicyModule, rows: Rows, batch: SequenceBatch, denominator: Tensor | None = None) -> Outcome:
    """Loss and gradient of one micro-batch; it is a whole optimiser step unless a denominator is given."""
    policy: Any = module.policy
    weight = policy.W
    weight.grad = None
    total = module.denominator(rows, batch) if denominator is None else denominator
    loss, metrics = module.loss_and_metrics(rows, replace(batch, denominator=total.double().reshape(-1)))
    loss.backward()
    assert weight.grad is not None
    quotients = {name: float(s) / max(float(w), 1e-300) for name, (s, w) in metrics.items()}
    return Outcome(loss.detach(), weight.grad.clone(), quotients)


def run_split(module: DiffusionPolicyModule, batch: SequenceBatch, parts: list[Tensor]) -> Outcome:
    """The same over micro-batches of these rows, with the denominators of all of them and fresh draws in each."""
    pieces = [batch.select(part) for part in parts]
    total = torch.stack([module.count(piece) for piece in pieces]).sum(0)
    outcomes = [run(module, module.corrupt(piece), piece, total) for piece in pieces]
    loss = torch.stack([o.loss for o in outcomes]).sum()
    return Outcome(loss, torch.stack([o.gradient for o in outcomes]).sum(0), {})


def with_old(
    module: DiffusionPolicyModule, rows: Rows, batch: SequenceBatch, old: TablePolicy, ref: TablePolicy | None = None
) -> SequenceBatch:
    """The batch with the row log-probs of an old policy, and of a reference where one is given."""
    stored = module.frozen_log_probs(old, rows, batch)[:, None]
    return replace(
        batch,
        old_log_probs=stored,
        ref_log_probs=None if ref is None else module.frozen_log_probs(ref, rows, batch)[:, None],
    )
