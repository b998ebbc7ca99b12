"""A peak of memory that a benchmark measures, as a program: `python -m tests.peak <benchmark> <arguments in JSON>`.

From the fork server a process starts with what it has imported and nothing computed, as the benchmarks' own do.
Memory that the imports no longer need is no room for what is measured: it goes back to the system, and the high mark
starts from what is held then.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from tests import processes
from tests.shared import ROOT


def measured(benchmark: str, *arguments: Any) -> float:
    """`benchmarks.<benchmark>.peak` with these arguments in a process of its own, in MB."""
    done = processes.run("tests.peak", benchmark, json.dumps(arguments), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    peak: float = json.loads(done.stdout)
    return peak


if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    print(json.dumps(importlib.import_module(f"benchmarks.{sys.argv[1]}").peak(*json.loads(sys.argv[2]))))
