"""Contexts in which a policy is only read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """No gradients and evaluation mode inside; the mode of every submodule is restored after."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for submodule, training in modes:
            submodule.training = training
