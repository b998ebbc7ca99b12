"""Every method on every family, with an adapter and without: two optimiser steps on a real rollout.

Families are found by their tiny builders, methods by their files in conf/; neither is named here.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

import dare_lightning.conf
from dare_lightning.cli.compose import compose
from dare_lightning.cli.tree import ConfTree
from dare_lightning.families.adapters import LoRA
from dare_lightning.families.load import families
from dare_lightning.generation.base import GenerationBackend
from dare_lightning.generation.builtin import BuiltinBackend
from dare_lightning.methods.base import DiffusionPolicyModule
from dare_lightning.replay.batch import SequenceBatch
from tests.tiny import TINY_BUILDERS

# Files without a class of their own are presets of another: other numbers, built by test_configs.
METHODS = sorted(
    path.stem
    for path in (Path(str(dare_lightning.conf.__file__)).parent / "method").glob("*.yaml")
    if not path.stem.startswith("_") and "_target_" in OmegaConf.load(path)
)
ROLLOUTS = [name for name in ConfTree().options("rollout") if name != "none"]
SMALL = ["scale=tiny", "completion.max_new_tokens=4", "completion.steps=2", "completion.block_length=2"]
# Prompts of different lengths: the answers to one of them are padded.
PROMPTS = ([9, 8, 7], [12, 9, 30, 31, 11])


@cache
def configured(method: str) -> DictConfig:
    """A fit by this method, with short completions and few noisy rows."""
    cfg = compose("fit", [f"method={method}", *SMALL])
    if "samples" in cfg.method:
        cfg.method.samples = min(cfg.method.samples, 4)
    return cfg


@cache
def rollout(name: str) -> DictConfig:
    """The backend of a file of conf/rollout."""
    return compose("fit", [f"rollout={name}", *SMALL]).rollout.backend


def backend_for(policy: Any, method: DiffusionPolicyModule, cfg: DictConfig) -> GenerationBackend:
    """The configured backend; for a block family the first that serves it and the method's needs."""
    if policy.block_length is None:
        return instantiate(cfg.rollout.backend) if cfg.get("rollout") else BuiltinBackend(steps=2, max_new_tokens=4)
    for name in ROLLOUTS:
        try:
            backend: GenerationBackend = instantiate(rollout(name))
            backend.validate(policy)
        except (ValueError, InstantiationException):
            continue
        if all(asdict(backend.capabilities)[need] for need in method.needs):
            return backend
    pytest.skip("no rollout of conf/rollout serves this family and this method")


def sampled(policy: Any, backend: GenerationBackend, method: DiffusionPolicyModule, leaves: int) -> SequenceBatch:
    """Rewarded answers of the policy, `leaves` to each prompt; what a method learns from, online or not."""
    backend.validate(policy)
    backend.update_weights(policy, version=0)
    count = leaves * len(PROMPTS)
    prompts = [prompt for prompt in PROMPTS for _ in range(leaves)]
    batch = backend.generate(prompts, range(count), record_states="states" in method.needs)
    reward = torch.linspace(1, 0, count) ** 2
    batch = replace(batch, group_index=torch.arange(count) // leaves, reward=reward)
    if not method.online:
        return batch
    if method.scores_steps:
        assert batch.proposals is not None
        batch = replace(batch, step_rewards=reward[:, None].expand(batch.proposals.shape[:2]))
    return method.freeze_policies(method.credit(batch), inner_epochs=1, keep_old=True)


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("family", TINY_BUILDERS)
def test_a_method_takes_two_steps_on_a_family(family: str, name: str, adapter: bool) -> None:
    policy = TINY_BUILDERS[family](layers=1, width=16, heads=2)
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
    # A tree of answers wants one prompt a leaf.
    leaves = math.prod((cfg.get("rollout") and cfg.rollout.backend.get("tree")) or [2])
    batch = sampled(policy, backend_for(policy, method, cfg), method, leaves)
    before = {key: value.detach().clone() for key, value in policy.named_parameters()}
    optimizer = method.optimizer([parameter for parameter in policy.parameters() if parameter.requires_grad])
    for step in range(2):
        rows = method.corrupt(batch)
        loss, metrics = method.loss_and_metrics(rows, replace(batch, denominator=method.count(batch)))
        assert loss.isfinite()
        if step == 0 and "ratio_mean" in metrics:
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
