"""Every method on every family, with an adapter and without: two optimiser steps on a real rollout.

Families are found by their tiny builders, methods by their files in conf/; neither is named here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig

import dare_lightning.conf
from dare_lightning.cli.compose import compose
from dare_lightning.families.adapters import LoRA
from dare_lightning.families.load import families
from dare_lightning.generation.base import GenerationBackend
from dare_lightning.generation.builtin import BuiltinBackend
from dare_lightning.methods.base import DiffusionPolicyModule
from dare_lightning.replay.batch import SequenceBatch
from tests.tiny import TINY_BUILDERS

METHODS = sorted(
    path.stem
    for path in (Path(str(dare_lightning.conf.__file__)).parent / "method").glob("*.yaml")
    if not path.stem.startswith("_")
)
SMALL = ["scale=tiny", "completion.max_new_tokens=8", "completion.steps=4", "completion.block_length=4"]
# Two answers to each of two prompts of different lengths: one pair is padded.
PROMPTS = [[9, 8, 7], [9, 8, 7], [12, 9, 30, 31, 11], [12, 9, 30, 31, 11]]
REWARDS = torch.tensor([1.0, 0.25, 0.0, 0.5])


@cache
def configured(method: str) -> DictConfig:
    """A fit by this method, with short completions."""
    return compose("fit", [f"method={method}", *SMALL])


def sampled(policy: Any, backend: GenerationBackend, method: DiffusionPolicyModule) -> SequenceBatch:
    """Rewarded answers of the policy; what a method learns from, online or not."""
    backend.validate(policy)
    backend.update_weights(policy, version=0)
    batch = backend.generate(PROMPTS, [3, 4, 5, 6], record_states="states" in method.needs)
    batch = replace(batch, group_index=torch.tensor([0, 0, 1, 1]), reward=REWARDS)
    if not method.online:
        return batch
    if method.scores_steps:
        assert batch.proposals is not None
        batch = replace(batch, step_rewards=torch.rand(batch.proposals.shape[:2]))
    return method.freeze_policies(method.credit(batch), inner_epochs=2, keep_old=True)


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("family", TINY_BUILDERS)
def test_a_method_takes_two_steps_on_a_family(family: str, name: str, adapter: bool) -> None:
    policy = TINY_BUILDERS[family](layers=2, width=16, heads=2)
    if adapter:
        LoRA(rank=2, alpha=4.0).apply(policy)
    cfg = configured(name)
    try:
        method: DiffusionPolicyModule = instantiate(cfg.method, policy=policy)
    except InstantiationException as refusal:
        if "is defined for" not in str(refusal):
            raise
        pytest.skip(f"refused by name: {refusal.__cause__}")
    method.train()
    method.keep_reference()
    backend = instantiate(cfg.rollout.backend) if cfg.get("rollout") else BuiltinBackend(steps=4, max_new_tokens=8)
    batch = sampled(policy, backend, method)
    before = {key: value.detach().clone() for key, value in policy.named_parameters()}
    optimizer = method.optimizer([parameter for parameter in policy.parameters() if parameter.requires_grad])
    for iteration in range(2):
        view = replace(batch, iteration=iteration)
        rows = method.corrupt(view)
        loss, metrics = method.loss_and_metrics(rows, replace(view, denominator=method.count(view)))
        assert loss.isfinite()
        if iteration == 0 and "ratio_mean" in metrics:
            total, weight = metrics["ratio_mean"]
            assert float(total / weight) == pytest.approx(1, abs=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = dict(policy.named_parameters())
    changed = {key for key, value in before.items() if not torch.equal(after[key], value)}
    assert changed == {key for key, value in after.items() if value.requires_grad}
    assert all(value.isfinite().all() for value in after.values())


def test_every_family_has_a_tiny_policy() -> None:
    built = {type(builder(layers=1, width=16, heads=2)) for builder in TINY_BUILDERS.values()}
    assert built == set(families())
