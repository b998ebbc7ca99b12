"""The value model that may be trained beside a policy."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dare_lightning.callbacks.rng_state import RngState
from dare_lightning.callbacks.rollout import RolloutCallback
from dare_lightning.datamodules.prompts import PromptDataModule
from dare_lightning.evaluation.benchmarks.sudoku import SudokuTask
from dare_lightning.export import export_policy
from dare_lightning.families.adapters import LoRA
from dare_lightning.families.load import load_policy
from dare_lightning.generation.builtin import BuiltinBackend
from dare_lightning.methods.tracerl import TraceRL
from dare_lightning.methods.valued import ValueSettings
from dare_lightning.replay.batch import SequenceBatch
from tests.equalities.conftest import Keep, Record, trainer, variety, weights
from tests.methods.matrix import built, tiny
from tests.methods.test_matrix import sampled
from tests.tiny import TINY_BUILDERS, tiny_llada

ADAMW = partial(torch.optim.AdamW, lr=1e-3)
VALUE = ValueSettings(learning_rate=1e-2)


def method(policy: Any, value: ValueSettings | None = VALUE, **settings: Any) -> TraceRL:
    """TraceRL in its own plan, row by row."""
    plan = {"gradient_plan": "accumulate", "rows_per_forward": 1, "kl_coef": 0.01}
    made = TraceRL(policy=policy, optimizer=ADAMW, value_model=value, **plan | settings)
    made.train()
    return made


def rollout(module: TraceRL) -> SequenceBatch:
    """Rewarded answers with values, and the denominators of a step of their own."""
    _, backend = built("tracerl", module.policy)
    batch = sampled(module.policy, backend, module, leaves=2)
    return replace(batch, denominator=module.count(batch))


def gradients(module: TraceRL, batch: SequenceBatch) -> dict[str, torch.Tensor]:
    """What one backward pass leaves in every trained parameter."""
    module.zero_grad()
    loss, _ = module.loss_and_metrics(module.corrupt(batch), batch)
    loss.backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("family", "adapter"), [*((family, False) for family in TINY_BUILDERS), ("llada", True), ("sdar_moe", True)]
)
def test_both_networks_take_two_steps_on_every_family(family: str, adapter: bool) -> None:
    policy = tiny(family)
    if adapter:
        LoRA(rank=2, alpha=4.0).apply(policy)
    stream = torch.get_rng_state()
    module = method(policy)
    batch = rollout(module)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer: Any = module.configure_optimizers()
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 1e-2]
    for _ in range(2):
        optimizer.zero_grad()
        loss, metrics = module.loss_and_metrics(module.corrupt(batch), batch)
        assert loss.isfinite()
        assert metrics["value_loss"][0] > 0
        loss.backward()
        optimizer.step()
    after = dict(module.named_parameters())
    changed = {name for name, value in before.items() if not torch.equal(after[name], value)}
    assert changed == {name for name, p in after.items() if p.requires_grad}
    assert all(p.grad is not None for p in after.values() if p.requires_grad)
    assert torch.equal(torch.get_rng_state(), stream)


def test_without_a_value_model_nothing_changes() -> None:
    module = method(tiny_llada(width=16), value=None)
    batch = rollout(module)
    assert module.value is None
    assert batch.token_advantage is None
    assert not any(name.startswith("value") for name in module.state_dict())


def test_at_first_every_value_is_zero_and_the_advantage_of_a_token_is_that_of_its_answer() -> None:
    module = method(tiny_llada(width=16))
    batch = rollout(module)
    assert batch.advantage is not None
    assert batch.token_advantage is not None
    assert not batch.old_values.any()  # type: ignore[union-attr]
    counted = batch.completion_mask & (batch.commit_step >= 0)  # type: ignore[operator]
    expected = batch.advantage[:, None].expand_as(counted)
    torch.testing.assert_close(batch.token_advantage[counted], expected[counted])
    torch.testing.assert_close(batch.value_target[counted], expected[counted])  # type: ignore[index]


def test_each_network_has_the_gradient_of_its_own_loss_alone() -> None:
    module = method(tiny_llada(width=16, dtype=torch.float64), gradient_plan="single", rows_per_forward=None)
    batch = rollout(module)
    torch.nn.init.normal_(module.value.head.weight, generator=torch.Generator().manual_seed(1))  # type: ignore[union-attr]
    both = gradients(module, batch)
    settings, module.value_model = module.value_model, None  # no value loss: the policy's gradient alone
    policy_alone = gradients(module, batch)
    module.value_model = settings
    value_alone = gradients(module, replace(batch, token_advantage=torch.zeros_like(batch.ids).double()))
    assert {name for name, grad in policy_alone.items() if grad.any()} == {n for n in both if n.startswith("policy.")}
    for name, grad in both.items():
        torch.testing.assert_close(grad, (policy_alone if name.startswith("policy.") else value_alone)[name])


@pytest.mark.parametrize("plan", ["accumulate", "replay"])
@pytest.mark.parametrize("family", ["llada", "sdar"])
def test_every_gradient_plan_gives_the_same_gradients(family: str, plan: Any) -> None:
    module = method(tiny(family).double(), gradient_plan="single", rows_per_forward=None)
    torch.nn.init.normal_(module.value.head.weight, generator=torch.Generator().manual_seed(1))  # type: ignore[union-attr]
    batch = rollout(module)
    whole = gradients(module, batch)
    module.gradient_plan, module.rows_per_forward = plan, 1
    found = gradients(module, batch)
    assert found.keys() == whole.keys()
    for name in whole:
        torch.testing.assert_close(found[name], whole[name], rtol=1e-8, atol=1e-10)


def test_the_value_loss_falls_on_a_fixed_rollout() -> None:
    module = method(tiny_llada(width=16), value=ValueSettings(learning_rate=1e-2, clip=None))
    batch = rollout(module)
    # Answers to one prompt begin in the same state: what can be learnt is which prompt is answered well.
    batch = module.freeze_policies(replace(batch, advantage=torch.tensor([1.0, 1, -1, -1])), 1, keep_old=True)
    optimizer: Any = module.configure_optimizers()
    errors = []
    for _ in range(15):
        optimizer.zero_grad()
        loss, metrics = module.loss_and_metrics(module.corrupt(batch), batch)
        errors.append(float(metrics["value_error"][0] / metrics["value_error"][1]))
        loss.backward()
        optimizer.step()
    assert errors[-1] < errors[0] / 4


def test_an_adapters_base_is_shared_and_not_copied() -> None:
    policy = tiny_llada(width=16)
    LoRA(rank=2, alpha=4.0).apply(policy)
    module = method(policy)
    assert module.value is not None
    own = {p.data_ptr() for p in module.value.parameters()} - {p.data_ptr() for p in policy.parameters()}
    assert len(own) == sum(p.requires_grad for p in policy.parameters()) + 1  # and the head


def test_gradients_are_clipped_apart() -> None:
    module = method(tiny_llada(width=16))
    for p in module.policy.parameters():
        p.grad = torch.full_like(p, 1e-6)
    assert module.value is not None
    for p in module.value.parameters():
        p.grad = torch.full_like(p, 1e3)
    module.configure_gradient_clipping(module.configure_optimizers(), 1.0, "norm")
    assert all(torch.equal(p.grad, torch.full_like(p, 1e-6)) for p in module.policy.parameters())  # type: ignore[arg-type]
    norm = torch.nn.utils.get_total_norm([p.grad for p in module.value.parameters() if p.grad is not None])
    assert float(norm) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": 1.5}, "value_model.gamma=1.5 is outside"),
        ({"gae_lambda": -0.1}, "gae_lambda=-0.1 is outside"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be above 0"),
        ({"clip": 0.0}, "clip=0.0 must be above 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ValueSettings(**settings)


class Run:
    """Two rollouts of 2 prompts x 2 answers, 2 updates each: 4 optimiser steps."""

    def __init__(self, adapter: bool = False) -> None:
        self.policy = tiny_llada(width=16)
        if adapter:
            LoRA(rank=2, alpha=4.0).apply(self.policy)
        sizes: dict[str, Any] = {"group_size": 2, "prompts_per_rollout": 2, "updates_per_rollout": 2, "micro_batch": 2}
        task = SudokuTask(form="compact")
        self.data = PromptDataModule(self.policy, variety, task=task, train_prompts=4, val_prompts=2, **sizes)
        self.method = method(self.policy)

    def fit(self, *callbacks: Any, ckpt_path: Path | None = None, **options: Any) -> Any:
        backend = BuiltinBackend(steps=2, max_new_tokens=6, temperature=1.0)
        run = trainer([RolloutCallback(backend), RngState(), *callbacks], limit_val_batches=0, **options)
        run.accumulate_grad_batches = self.data.micro_batches_per_step(run.world_size)
        run.fit(self.method, datamodule=self.data, ckpt_path=ckpt_path)
        return run


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_a_resumed_run_equals_a_whole_one(adapter: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole, record = Run(adapter), Record()
    whole.fit(Keep(tmp_path, at=[1]), logger=record, gradient_clip_val=1.0)
    saved = torch.load(tmp_path / "inside-1.ckpt", weights_only=True)["state_dict"]
    assert "value.head.weight" in saved
    assert all(".lora_" in name or name == "value.head.weight" for name in saved) == adapter
    resumed = Run(adapter)
    resumed.fit(ckpt_path=tmp_path / "inside-1.ckpt", gradient_clip_val=1.0)
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)
    assert weights(whole)["value.head.weight"].any()
    assert {"train/value_loss", "train/value_error", "train/value_mean"} <= record.names()


def test_an_export_leaves_the_value_model_out(tmp_path: Path) -> None:
    module = method(tiny_llada(width=16))
    export_policy(module.policy, tmp_path / "model")
    read: Any = load_policy(str(tmp_path / "model"))
    assert read.state_dict().keys() == module.policy.state_dict().keys()  # type: ignore[attr-defined]
