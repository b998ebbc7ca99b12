"""Micro-batches by tokens: within the budget, equally many, and without an effect on the loss."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from dare_lightning.datamodules.sft import SFTDataModule
from dare_lightning.datamodules.splitting import TokenSplit
from dare_lightning.evaluation.benchmarks.countdown import CountdownTask
from dare_lightning.families.base import using_attention
from dare_lightning.methods.sft import SFT
from tests.tiny import tiny_llada


def test_no_step_exceeds_the_budget_and_every_step_has_as_many_parts() -> None:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 90, (200,), generator=draw).tolist()
    plan = TokenSplit.of(lengths, step=16, budget=200)
    for _ in range(50):
        step = [lengths[i] for i in torch.randperm(200, generator=draw)[:16]]
        parts = plan.split(step, lambda n: n)
        assert len(parts) == plan.parts
        assert max(sum(part) for part in parts) <= 200
        assert sorted(n for part in parts for n in part) == sorted(step)


def test_the_plan_takes_no_more_parts_than_the_longest_samples_need() -> None:
    assert TokenSplit.of([10] * 20, step=8, budget=20).parts == 4
    assert TokenSplit.of([10] * 20, step=8, budget=80).parts == 1


def test_a_sample_beyond_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a sample of 30 tokens exceeds data\.max_tokens=20"):
        TokenSplit.of([10, 30], step=2, budget=20)


def _data(policy: Any, **sizes: Any) -> SFTDataModule:
    data = SFTDataModule(
        policy, task=_Task(), count=24, batch_size=8, max_length=256, eos_fill="none", append_eos=False, **sizes
    )
    data.setup()
    return data


class _Task:
    """Countdown puzzles with answers of different lengths."""

    def examples(self, split: Any, count: int, seed: int) -> list[Any]:
        found = CountdownTask(form="compact").examples(split, count, seed)
        return [replace(e, extra=e.extra | {"answer": "1" * (1 + 7 * n % 40)}) for n, e in enumerate(found)]


def _step(policy: Any, data: SFTDataModule) -> tuple[torch.Tensor, torch.Tensor, int]:
    method = SFT(policy, partial(torch.optim.SGD, lr=0.1))
    policy.zero_grad()
    batches = [make() for make in next(data.windows(0, 0, 1))]
    total = torch.stack([method.count(batch) for batch in batches]).sum(0)
    losses = []
    for batch in batches:
        loss, _ = method.loss_and_metrics(method.corrupt(batch), replace(batch, denominator=total))
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum(), torch.cat([p.grad.flatten() for p in policy.parameters()]), len(batches)


def test_loss_and_gradient_do_not_depend_on_how_a_step_was_split() -> None:
    policy: Any = tiny_llada(dtype=torch.float64)
    whole, gradient, one = _step(policy, _data(policy, micro_batch=8))
    for sizes in ({"max_tokens": 150}, {"max_tokens": 400}, {"micro_batch": 2}):
        with using_attention(policy, "varlen"):
            loss, found, parts = _step(policy, _data(policy, **sizes))
        assert one == 1 < parts
        torch.testing.assert_close(loss, whole)
        torch.testing.assert_close(found, gradient)


def test_every_forward_pass_keeps_the_budget() -> None:
    policy: Any = tiny_llada()
    data = _data(policy, max_tokens=150)
    windows = [window for epoch in range(3) for window in data.windows(epoch, 0, 1)]
    assert {len(window) for window in windows} == {data.micro_batches_per_step(1)}
    assert max(int(make().attention_mask.sum()) for window in windows for make in window) <= 150


def test_end_of_text_fill_counts_as_tokens() -> None:
    policy: Any = tiny_llada()
    data = SFTDataModule(policy, task=_Task(), count=24, batch_size=8, max_length=256, eos_fill="batch", max_tokens=300)
    data.setup()
    batches = [make() for window in data.windows(0, 0, 1) for make in window]
    assert max(int(batch.attention_mask.sum()) for batch in batches) <= 300
