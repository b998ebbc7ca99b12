"""Every method on every family: an update does not depend on how its rows are split, ordered, padded or planned."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dare_lightning.methods.base import DiffusionPolicyModule
from dare_lightning.replay.batch import SequenceBatch
from tests.methods.matrix import METHODS, Undefined, built, configured, tiny
from tests.methods.test_matrix import sampled
from tests.tiny import TINY_BUILDERS


def update(method: DiffusionPolicyModule, pieces: list[SequenceBatch]) -> tuple[Tensor, Tensor]:
    """Loss and gradient of an optimiser step over these micro-batches."""
    policy: Any = method.policy
    policy.zero_grad()
    total = torch.stack([method.count(piece) for piece in pieces]).sum(0)
    losses = []
    for piece in pieces:
        loss, _ = method.loss_and_metrics(method.corrupt(piece), replace(piece, denominator=total))
        loss.backward()
        losses.append(loss.detach())
    gradients = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
    return torch.stack(losses).sum(), torch.cat(gradients)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("family", TINY_BUILDERS)
def test_an_update_depends_on_its_rows_alone(family: str, name: str) -> None:
    policy = tiny(family).double()
    try:
        method, backend = built(name, policy)
    except Undefined as reason:
        pytest.skip(str(reason))
    cfg = configured(name)
    method.train()
    method.keep_reference()
    leaves = math.prod((cfg.get("rollout") and cfg.rollout.backend.get("tree")) or [2])
    batch = sampled(policy, backend, method, leaves)
    loss, gradient = update(method, [batch])
    assert gradient.abs().max() > 0
    # The other prompt first, its answers backwards (pairs say by their place which answer is preferred); alone, each
    # prompt's rows need no padding.
    rows = torch.arange(len(batch)).view(-1, leaves).flip(0)
    pieces = [batch.select(part if method.compares_pairs else part.flip(0)).trim() for part in rows]
    assert len({piece.ids.shape[1] for piece in pieces}) > 1
    method.gradient_plan, method.rows_per_forward = "replay" if method.gradient_plan != "replay" else "single", 2
    again, found = update(method, pieces)
    torch.testing.assert_close(again, loss, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found, gradient, rtol=1e-6, atol=1e-12)
