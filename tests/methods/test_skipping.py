"""Completions that teach nothing are never run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dare_lightning.methods.coupled_grpo import CoupledGRPO
from dare_lightning.methods.d1 import D1
from dare_lightning.methods.tracerl import TraceRL
from tests.methods.harness import build, run
from tests.methods.table_model import TablePolicy, random_tables, sequence_batch


def _batch(advantage: list[float]) -> Any:
    ids = torch.randint(0, 8, (4, 9), generator=torch.Generator().manual_seed(3))
    return sequence_batch(ids, 3, advantage=torch.tensor(advantage, dtype=torch.float64))


@pytest.mark.parametrize("method", [D1, CoupledGRPO])
def test_a_completion_without_advantage_is_not_run_and_counts_in_the_denominator(method: Any) -> None:
    policy = TablePolicy(random_tables())
    module = build(method, policy)
    batch = _batch([1.0, 0.0, 0.0, -0.5])
    read = []
    denoise = policy.denoise
    policy.denoise = lambda noisy, *rest: (read.append(len(noisy)), denoise(noisy, *rest))[1]  # type: ignore[method-assign]
    rows = module.corrupt(batch)
    skipped = run(module, rows, batch)
    few = sum(read)
    read.clear()
    module.teaches = lambda batch: None
    whole = run(module, rows, batch)
    assert few < sum(read)
    torch.testing.assert_close(skipped.loss, whole.loss)
    torch.testing.assert_close(skipped.gradient, whole.gradient)


def test_with_a_reference_every_completion_is_run() -> None:
    module = build(D1, TablePolicy(random_tables()), kl_coef=0.1)
    assert module.teaches(_batch([1.0, 0.0, 0.0, -0.5])) is None


def test_a_micro_batch_without_any_advantage_has_loss_and_gradient_zero() -> None:
    module = build(D1, TablePolicy(random_tables()))
    batch = _batch([0.0] * 4)
    outcome = run(module, module.corrupt(batch), batch)
    assert outcome.loss == 0
    assert not outcome.gradient.any()


@pytest.mark.parametrize("keep_old", [False, True], ids=["one_update", "several"])
def test_a_divergence_from_the_old_policy_is_run_only_where_that_is_another_one(keep_old: bool) -> None:
    policy = TablePolicy(random_tables())
    module = build(TraceRL, policy, kl_coef=0.1)
    steps = torch.tensor([[-1, -1, -1, 0, 0, 1, 1, 2, 2]]).expand(4, -1)
    batch = replace(_batch([1.0, 0.0, 0.0, -0.5]), commit_step=steps)
    batch = module.freeze_policies(batch, inner_epochs=1, keep_old=keep_old)
    assert batch.old_log_probs is None or all(batch.old_log_probs.flatten(1).any(1))  # the old policy is run on all
    batch = replace(batch, denominator=module.count(batch))
    read = []
    denoise = policy.denoise
    policy.denoise = lambda noisy, *rest: (read.append(len(noisy)), denoise(noisy, *rest))[1]  # type: ignore[method-assign]
    rows = module.corrupt(batch)
    found = run(module, rows, batch)
    assert sum(read) == (12 if keep_old else 6)
    module.teaches = lambda batch: None
    whole = run(module, rows, batch)
    torch.testing.assert_close(found.loss, whole.loss)
    torch.testing.assert_close(found.gradient, whole.gradient)
