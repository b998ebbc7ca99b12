"""Load of this machine and process, under the names that MLflow's system page shows."""

from __future__ import annotations

import psutil
import torch

MEBI = 2**20


def system_metrics() -> dict[str, float]:
    """CPU, memory and, where CUDA is in use already, GPU load; costs well under a millisecond without a GPU."""
    memory = psutil.virtual_memory()
    values = {
        "system/cpu_utilization_percentage": psutil.cpu_percent(),
        "system/system_memory_usage_megabytes": memory.used / MEBI,
        "system/system_memory_usage_percentage": memory.percent,
        "system/process_memory_usage_megabytes": psutil.Process().memory_info().rss / MEBI,
    }
    # Asking earlier would create a CUDA context behind the trainer's back.
    if torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            values[f"system/gpu_{device}_allocated_megabytes"] = torch.cuda.memory_allocated(device) / MEBI
            values[f"system/gpu_{device}_reserved_megabytes"] = torch.cuda.memory_reserved(device) / MEBI
        free, total = torch.cuda.mem_get_info()
        device = torch.cuda.current_device()
        values[f"system/gpu_{device}_memory_usage_megabytes"] = (total - free) / MEBI
        values[f"system/gpu_{device}_memory_usage_percentage"] = 100 * (total - free) / total
    return values
