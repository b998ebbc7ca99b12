"""Every method on every family, with an adapter and without: two optimiser steps on a real rollout."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from dare_lightning.families.adapters import LoRA
from dare_lightning.families.load import families
from dare_lightning.generation.base import GenerationBackend
from dare_lightning.methods.base import DiffusionPolicyModule
from dare_lightning.replay.batch import SequenceBatch
from tests.methods.matrix import MEASURED, METHODS, UNMEASURED, Undefined, built, configured, table, tiny
from tests.shared import ROOT
from tests.tiny import TINY_BUILDERS

DOCUMENTED = (ROOT / "docs" / "diagnostics.md").read_text(encoding="utf-8")
# Prompts of different lengths: the answers to one of them are padded.
PROMPTS = ([9, 8, 7], [12, 9, 30, 31, 11])


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
    policy = tiny(family)
    if adapter:
        LoRA(rank=2, alpha=4.0).apply(policy)
    try:
        # An adapter's reference is the policy itself with the adapter switched off, which costs no copy.
        method, backend = built(name, policy, held=adapter)
    except Undefined as reason:
        pytest.skip(str(reason))
    cfg, global_stream = configured(name), torch.get_rng_state()
    method.train()
    method.keep_reference()
    # A tree of answers wants one prompt a leaf.
    leaves = math.prod((cfg.get("rollout") and cfg.rollout.backend.get("tree")) or [2])
    batch = sampled(policy, backend, method, leaves)
    before = {key: value.detach().clone() for key, value in policy.named_parameters()}
    optimizer = method.optimizer([parameter for parameter in policy.parameters() if parameter.requires_grad])
    for step in range(2):
        rows = method.corrupt(batch)
        if method.scores_once:
            assert int(rows.score_mask.sum(1).max()) <= 1
            assert batch.old_log_probs is None or batch.old_log_probs.shape[2] == 1
        loss, metrics = method.loss_and_metrics(rows, replace(batch, denominator=method.count(batch)))
        assert loss.isfinite()
        assert {measured for measured in MEASURED if (name, measured) not in UNMEASURED} <= metrics.keys()
        assert all(f"`train/{measured}`" in DOCUMENTED for measured in metrics)
        assert not [measured for method, measured in UNMEASURED if method == name and measured in metrics]
        if step == 0 and "ratio_mean" in metrics:
            total, weight = metrics["ratio_mean"]
            assert float(total / weight) == pytest.approx(1, abs=1e-5)
            assert not adapter or "kl" in metrics
            for divergence in {"old_kl", "kl"} & metrics.keys():
                total, weight = metrics[divergence]
                assert float(total / weight) == pytest.approx(0, abs=1e-6), divergence
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = dict(policy.named_parameters())
    changed = {key for key, value in before.items() if not torch.equal(after[key], value)}
    assert changed == {key for key, value in after.items() if value.requires_grad}
    assert all(value.isfinite().all() for value in after.values())
    assert torch.equal(torch.get_rng_state(), global_stream)


def test_every_family_has_a_tiny_policy() -> None:
    assert {type(tiny(family)) for family in TINY_BUILDERS} == set(families())


def test_the_readme_shows_what_is_defined() -> None:
    assert table() in (ROOT / "README.md").read_text(encoding="utf-8"), "print it with python -m tests.methods.matrix"
