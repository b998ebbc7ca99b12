"""What a run computes on."""

from __future__ import annotations

import torch

from dare_lightning.cli.errors import UserError


def accelerator(asked: str) -> str:
    """The accelerator that Lightning is told: "auto" is an NVIDIA (or ROCm) GPU where there is one, else the CPU.

    Raises:
        UserError: a GPU is asked for where there is none, or Apple's, which has no float64: draws and the totals that
            losses are divided by are computed in it.
    """
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "mps" or (asked == "gpu" and not torch.cuda.is_available() and torch.backends.mps.is_available()):
        raise UserError(
            f"trainer.accelerator={asked}: Apple's GPUs compute no float64, which is needed; use trainer=cpu"
        )
    if asked in ("gpu", "cuda") and not torch.cuda.is_available():
        raise UserError(
            f"trainer.accelerator={asked}: PyTorch {torch.__version__} finds no CUDA device here; use trainer=cpu, or"
            " trainer=auto for whatever there is"
        )
    return asked
