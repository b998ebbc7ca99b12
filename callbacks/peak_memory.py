"""The most memory that was held."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

MEBI = 2**20


def reset_peak(device: torch.device) -> None:
    """Measure anew from here, which a GPU can and a process cannot."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> float:
    """The most memory held so far, in MB of 2**20 bytes.

    On a GPU: what torch allocated on this device since `reset_peak`. On the CPU: resident memory of this process since
    it started, with the interpreter and its libraries.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MEBI
    status = Path("/proc/self/status")
    if status.exists():
        # Linux hands the high mark of the parent on in getrusage, and starts anew here.
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MEBI if sys.platform == "darwin" else peak / 1024
