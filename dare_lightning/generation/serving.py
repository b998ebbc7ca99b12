"""What every backend that runs the policy in this process needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import Any

import torch
from torch import nn

from dare_lightning.families.base import PolicyModel


@contextmanager
def evaluating(policy: PolicyModel) -> Iterator[torch.device]:
    """Dropout off in every submodule, and exactly those that were training train again afterwards."""
    if not isinstance(policy, nn.Module):
        raise TypeError(f"this backend runs torch modules, got {type(policy).__name__}")
    training = [module for module in policy.modules() if module.training]
    policy.eval()
    try:
        yield next(policy.parameters()).device
    finally:
        for module in training:
            module.training = True


def check_choice(name: str, found: str, allowed: Sequence[str]) -> None:
    """Raise ValueError where a setting has another value than those allowed."""
    if found not in allowed:
        raise ValueError(f"{name}={found!r} is not one of {', '.join(allowed)}")


def check_prompts(prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> None:
    """Raise ValueError where there is no prompt, an empty one, or not one seed for each."""
    if len(prompts) == 0:
        raise ValueError("no prompts to complete; give at least one")
    if len(prompts) != len(seeds):
        raise ValueError(f"{len(prompts)} prompts but {len(seeds)} seeds; give one seed for each prompt")
    empty = [i for i, prompt in enumerate(prompts) if len(prompt) == 0]
    if empty:
        raise ValueError(f"prompt {empty[0]} has no tokens; start it with at least one, such as the start token")


def plain(value: Any) -> Any:
    """A setting as JSON takes it."""
    if is_dataclass(value) and not isinstance(value, type):
        return {"name": type(value).__name__} | asdict(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else list(value)
