"""The runs that one process and two processes must agree on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.equalities.conftest import Offline, Online


def online() -> Online:
    """Coupled-GRPO with a reference, two windows and two inner epochs a rollout, two rollouts."""
    return Online(dtype=torch.float64, micro_batch=2)


def offline() -> Offline:
    """Fine-tuning in steps of 4 whose last is shorter; how many tokens are hidden differs between the ranks."""
    return Offline(dtype=torch.float64, micro_batch=1, normalization="masked_tokens")


RUNS: dict[str, Callable[[], Any]] = {"online": online, "offline": offline}
