"""What the numbers were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """Processor, cores, threads, memory, GPU and versions; `load` is the number of busy processes before the start."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if platform.system() == "Linux" else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_gb": _memory(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 1),
    }


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    names = [line for line in file.read_text().splitlines() if line.startswith("model name")] if file.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()


def _memory() -> float:
    import psutil

    return round(psutil.virtual_memory().total / 1e9, 1)
