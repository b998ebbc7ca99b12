"""What a rollout keeps of the old policy and the reference."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from dare_lightning.methods.cj_grpo import CJGRPO
from dare_lightning.methods.dipo import DiPO
from dare_lightning.methods.justgrpo import JustGRPO
from dare_lightning.methods.tracerl import TraceRL
from tests.methods.table_model import sequence_batch
from tests.tiny import tiny_llada

SGD = partial(torch.optim.SGD, lr=0.1)
LENGTH, PROMPT = 34, 2


def written(steps: int, seed: int = 0) -> Any:
    """Two answers of 32 tokens, written in so many steps."""
    draws = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 40, (2, LENGTH), generator=draws)
    order = torch.arange(LENGTH - PROMPT) * steps // (LENGTH - PROMPT)
    step = torch.cat([torch.full((PROMPT,), -1), order]).expand(2, -1)
    advantage = torch.tensor([1.0, -0.5])
    return sequence_batch(ids, PROMPT, commit_step=step, advantage=advantage, group_index=torch.zeros(2).long())


def method(kind: Any, **settings: Any) -> Any:
    module = kind(tiny_llada(dtype=torch.float64), SGD, kl_coef=0.1, **settings)
    module.keep_reference()
    return module


@pytest.mark.parametrize("kind", [CJGRPO, TraceRL, DiPO, JustGRPO])
def test_what_is_kept_does_not_grow_with_the_steps(kind: Any) -> None:
    few, many = (method(kind).freeze_policies(written(steps), 2, keep_old=True) for steps in (2, 32))
    assert few.old_log_probs.shape == many.old_log_probs.shape == (2, 2, 1, LENGTH)
    assert (many.ref_log_probs is None) == (kind is TraceRL)


@pytest.mark.parametrize("plan", ["single", "accumulate", "replay"])
def test_rows_kept_as_one_give_the_loss_of_rows_kept_apart(plan: Any) -> None:
    module = method(CJGRPO, gradient_plan=plan, rows_per_forward=None if plan == "single" else 3)
    batch = written(8)
    merged = module.freeze_policies(batch, 1, keep_old=True)
    rows = module.corrupt(batch)
    old, ref = (module.frozen_log_probs(p, rows, batch)[:, None] for p in (module.policy, copy.deepcopy(module.policy)))
    apart = replace(batch, old_log_probs=old, ref_log_probs=ref)
    with torch.no_grad():
        for parameter in module.policy.parameters():
            parameter.mul_(1.2)
    results = []
    for kept in (merged, apart):
        module.policy.zero_grad()
        loss, metrics = module.loss_and_metrics(rows, replace(kept, denominator=module.count(batch)))
        loss.backward()
        results.append((loss.detach(), metrics, [p.grad.clone() for p in module.policy.parameters()]))
    torch.testing.assert_close(results[0], results[1])
    assert float(results[0][1]["kl"][0]) > 1e-3
