"""Whether an optimiser's steps are large enough for the precision that the weights are stored in."""

from __future__ import annotations

import torch
from torch.optim import Optimizer


def check_resolution(optimizer: Optimizer) -> None:
    """An adaptive step moves a weight by about the learning rate; a step below the spacing of its type is lost.

    Raises:
        ValueError: nine in ten steps would be lost.
    """
    for group in optimizer.param_groups:
        coarse = [p for p in group["params"] if p.dtype in (torch.bfloat16, torch.float16) and p.dim() > 1]
        if not coarse:
            continue
        largest = max(coarse, key=lambda p: p.numel()).detach().flatten()[:100_000]
        lost = float(((largest + group["lr"]) == largest).float().mean())
        if lost > 0.9:
            raise ValueError(
                f"a learning rate of {group['lr']:.3g} changes only {100 * (1 - lost):.0f} % of the weights stored in"
                f" {largest.dtype}; keep them in float32 (model.dtype=float32 trainer.precision=bf16-mixed), train an"
                " adapter (peft=lora), or raise the rate"
            )
