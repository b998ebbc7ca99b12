"""Groups that are nearly always right or wrong may be left out of training."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from dare_lightning.methods.d1 import D1
from dare_lightning.methods.dipo import DiPO
from dare_lightning.methods.group_relative import GroupRelativeMethod
from dare_lightning.replay.batch import SequenceBatch
from tests.callbacks.test_rollout import Scripted
from tests.equalities.conftest import Online, Record, weights
from tests.methods.harness import build, run
from tests.methods.matrix import METHODS, Undefined, built, tiny
from tests.methods.table_model import TablePolicy, random_tables, sequence_batch
from tests.methods.test_matrix import sampled

# The first group is solved in half of its answers, the second in all of them; rewards differ within both.
REWARDS = [1.0, 0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers write where they are started."""
    monkeypatch.chdir(tmp_path)


class Seen(L.Callback):
    """The groups of all micro-batches that were trained on."""

    def __init__(self) -> None:
        self.groups: set[int] = set()

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Of a micro-batch whose samples are all left out, one stands there, of which nothing counts."""
        counted = batch.completion_mask.any(1)
        self.groups |= set(batch.group_index[counted].tolist())


class Filtered(Online):
    """One rollout of two prompts x four answers with a reference, whose groups may be left out."""

    def __init__(self, keep_accuracy: Any, rewards: list[float] = REWARDS, kind: Any = DiPO, **data: Any) -> None:
        sizes = {"prompts_per_rollout": 2, "updates_per_rollout": 1, "inner_epochs": 2, "micro_batch": 2}
        method: Any = partial(kind, keep_accuracy=keep_accuracy)
        super().__init__(torch.float64, method, **sizes | data)
        self.data.reward = Scripted(*rewards)


def test_a_group_outside_the_range_is_not_trained_on_and_said_to_be(caplog: pytest.LogCaptureFixture) -> None:
    record, seen = Record(), Seen()
    one = Filtered([0.1, 0.9])
    with caplog.at_level(logging.INFO):
        one.fit(seen, logger=record, max_epochs=1)
    assert seen.groups == {0}
    assert record.series("rollout/left_out_groups") == [0.5]
    assert "1 of 2 groups are left out of training" in caplog.text


def test_leaving_out_equals_a_rollout_without_the_group() -> None:
    torch.manual_seed(0)
    tables = TablePolicy(random_tables())
    module = build(DiPO, tables, kl_coef=0.1, keep_accuracy=[0.1, 0.9])
    ids = torch.randint(0, 8, (4, 9), generator=torch.Generator().manual_seed(3))
    batch: SequenceBatch = sequence_batch(
        ids,
        3,
        advantage=torch.tensor([0.5, -0.5, 0.0, 0.0], dtype=torch.float64),
        solved=torch.tensor([True, False, True, True]),
        group_index=torch.tensor([0, 0, 1, 1]),
        commit_step=torch.tensor([[-1, -1, -1, 0, 0, 1, 1, 2, 2]]).expand(4, -1),
    )
    batch = replace(batch, left_out=module.leaves_out(batch))
    assert batch.left_out is not None
    assert batch.left_out.tolist() == [False, False, True, True]
    kept, alone = batch.kept(), replace(batch.select(slice(0, 2)), left_out=None)
    torch.testing.assert_close(run(module, module.corrupt(kept), kept), run(module, module.corrupt(alone), alone))


@pytest.mark.parametrize("bounds", [None, [0.0, 1.0]])
def test_the_whole_range_leaves_nothing_out(bounds: Any) -> None:
    torch.testing.assert_close(weights(fitted(Filtered(bounds))), weights(fitted(Filtered(None))), rtol=0, atol=0)


def test_a_micro_batch_of_left_out_samples_adds_nothing_to_what_is_divided_by() -> None:
    kind = partial(D1, aggregation="sequence_mean_token_mean")
    one, few = (fitted(Filtered([0.1, 0.9], kind=kind, micro_batch=size)) for size in (8, 1))
    torch.testing.assert_close(weights(few), weights(one), rtol=1e-7, atol=1e-7)


def test_a_rollout_that_is_left_out_as_a_whole_has_no_gradient() -> None:
    run_ = Filtered([0.1, 0.9], rewards=[1.0] * 8)
    start = weights(run_)
    record = Record()
    run_.method.optimizer = partial(torch.optim.SGD, lr=1.0)
    run_.fit(logger=record, max_epochs=1)
    torch.testing.assert_close(weights(run_), start, rtol=0, atol=0)
    assert record.series("train/loss") == [0, 0]


def fitted(run_: Filtered) -> Filtered:
    run_.fit(max_epochs=1)
    return run_


@pytest.mark.parametrize("name", METHODS)
def test_every_method_bears_a_micro_batch_without_anything_to_train(name: str) -> None:
    policy = tiny("llada")
    try:
        method, backend = built(name, policy)
    except Undefined:
        policy = tiny("sdar")
        method, backend = built(name, policy)
    if not isinstance(method, GroupRelativeMethod):
        pytest.skip("it leaves nothing out")
    method.keep_reference()
    batch = sampled(policy, backend, method, leaves=2)
    nothing = replace(batch, left_out=torch.ones(len(batch), dtype=torch.bool)).kept()
    rows = method.corrupt(nothing)
    denominator = torch.zeros_like(method.count(nothing))
    loss, _ = method.loss_and_metrics(rows, replace(nothing, denominator=denominator))
    loss.backward()
    assert loss == 0
    assert all(p.grad is None or not p.grad.any() for p in policy.parameters())


@pytest.mark.parametrize("bounds", [[0.9, 0.1], [0.5], [-0.1, 1.0], [0.0, 1.1]])
def test_bounds_that_are_none_are_refused(bounds: Any) -> None:
    with pytest.raises(ValueError, match=r"keep_accuracy=.* must be two ordered numbers in \[0, 1\]"):
        build(DiPO, TablePolicy(random_tables()), keep_accuracy=bounds)
