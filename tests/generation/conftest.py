"""The policy and the backends that the generation tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dare_lightning.families.llada import LLaDA
from dare_lightning.generation.builtin import BuiltinBackend
from tests.tiny import tiny_llada

Backend = Callable[..., BuiltinBackend]


def served_policy() -> LLaDA:
    """Random float64 weights, output scaled so that the distribution is neither flat nor certain."""
    model = tiny_llada(seed=3, dtype=torch.float64)
    scale_output(model, 2.0)
    return model


@pytest.fixture
def policy() -> LLaDA:
    """A policy of this test's own."""
    return served_policy()


@pytest.fixture
def backend(policy: LLaDA) -> Backend:
    """Builds a backend that holds `policy`, or another one."""

    def build(served: LLaDA = policy, **settings: Any) -> BuiltinBackend:
        built = BuiltinBackend(**({"steps": 8, "max_new_tokens": 16, "early_stop": False} | settings))
        built.validate(served)
        built.update_weights(served, version=0)
        return built

    return build


def scale_output(model: LLaDA, factor: float) -> None:
    """Multiply every logit by `factor`: towards 0 the distribution becomes uniform."""
    with torch.no_grad():
        model.get_parameter("model.transformer.ff_out.weight").mul_(factor)
