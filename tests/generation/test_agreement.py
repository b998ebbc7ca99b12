"""Log-probs that a rollout reports, and those that training finds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dare_lightning.generation.agreement import log_prob_gaps
from dare_lightning.generation.block import BlockBackend
from dare_lightning.generation.block_engine import Editing
from dare_lightning.generation.builtin import BuiltinBackend
from tests.tiny import TINY_BUILDERS, tiny_llada

PROMPTS = [[9, 8, 7], [9, 8, 7], [12, 9, 30, 31, 11], [7, 7]]


def gaps(policy: Any, backend: Any, samples: int = 4) -> torch.Tensor:
    backend.update_weights(policy, 0)
    batch = backend.generate(PROMPTS, [1, 2, 3, 4])
    return log_prob_gaps(policy, batch, backend.capabilities, samples)


def builtin(**settings: Any) -> BuiltinBackend:
    return BuiltinBackend(**{"max_new_tokens": 16, "steps": 8, "temperature": 1.0, "block_length": 8} | settings)


@pytest.mark.parametrize(
    "settings", [{}, {"remasking": "random"}, {"cfg_scale": 1.0, "early_stop": False}, {"suppress_eos": True}], ids=str
)
def test_the_exact_sampler_reports_what_training_finds(settings: dict[str, Any]) -> None:
    found = gaps(tiny_llada(), builtin(**settings))
    assert len(found) == 4 * 2
    assert float(found.max()) < 1e-5


@pytest.mark.parametrize("early_stop", ["block", "token"])
@pytest.mark.parametrize("family", [name for name in TINY_BUILDERS if TINY_BUILDERS[name]().block_length is not None])
def test_the_block_sampler_reports_what_training_finds(family: str, early_stop: Any) -> None:
    policy = TINY_BUILDERS[family](layers=2, width=16, heads=2)
    found = gaps(policy, BlockBackend(max_new_tokens=16, temperature=1.0, early_stop=early_stop))
    assert len(found) >= 4
    assert float(found.max()) < 1e-5


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_a_cache_shows_in_the_gap(cache: Any) -> None:
    # At random weights hardly anything depends on the context; these do.
    policy = tiny_llada()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5)
    assert float(gaps(policy, builtin(cache=cache)).max()) > 1e-3
    assert float(gaps(policy, builtin()).max()) < 1e-5


@pytest.mark.parametrize(
    ("policy", "backend"),
    [
        (tiny_llada, builtin(running_confidence=True, early_stop=False)),
        (tiny_llada, builtin(eos_policy="truncate")),
        (TINY_BUILDERS["llada2"], BlockBackend(max_new_tokens=16, temperature=1.0, editing=Editing())),
    ],
    ids=["running_confidence", "truncate", "editing"],
)
def test_there_is_no_gap_where_steps_do_not_tell_the_state(policy: Any, backend: Any) -> None:
    assert len(gaps(policy(), backend)) == 0


def test_the_same_completions_are_looked_at_every_time_and_no_more_than_asked() -> None:
    policy, backend = tiny_llada(), builtin()
    backend.update_weights(policy, 0)
    batch = backend.generate(PROMPTS, [1, 2, 3, 4])
    wrong = replace(batch, commit_log_probs=batch.commit_log_probs - torch.arange(16 + 5.0))
    first, second = (log_prob_gaps(policy, wrong, backend.capabilities, 2) for _ in range(2))
    assert len(first) == 2 * 2
    assert torch.equal(first, second)
    assert len(log_prob_gaps(policy, wrong, backend.capabilities, 0)) == 0
