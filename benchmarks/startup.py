"""Seconds from the command to its first useful sign, as real processes."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.shared import ROOT

LIMITS = {"help": 3.0, "first training step": 20.0}
"""What the project holds itself to, in seconds on two idle cores."""
PATIENCE = 120.0
"""Seconds after which a start is given up."""
ENOUGH = 60.0
"""Seconds of one case after which it is not repeated again."""


def run(quick: bool) -> list[dict[str, Any]]:
    """Measure help, composition and the default run up to the end of its first optimiser step.

    The first training step is taken when its checkpoint is on the disk, so loading, the first rollout, the validation
    before it and the saving are all in it. A machine too busy to get there in `PATIENCE` seconds is not waited for, and
    a case is repeated while it has taken less than `ENOUGH`.

    Returns:
        one dict a case: case, unit, measured; cpu, the processor seconds of the process itself, which other work on
        the machine changes least; limit where there is one, speedup = limit / measured.
    """
    cases = {"bare python": ["-c", "pass"], "import of torch": ["-c", "import torch"]}
    cases |= {
        "help": ["-m", "dare_lightning", "--help"],
        "fit --help": ["-m", "dare_lightning", "fit", "--help"],
        "fit --cfg job": ["-m", "dare_lightning", "fit", "--cfg", "job"],
    }
    starts = {case: partial(_process, words) for case, words in cases.items()} | {"first training step": _first_step}
    return [_result(case, _repeated(start, 1 if quick else 3)) for case, start in starts.items()]


def _repeated(start: Callable[[], Start], repeats: int) -> list[Start]:
    began = time.perf_counter()
    taken = [start()]
    while len(taken) < repeats and time.perf_counter() - began < ENOUGH:
        taken.append(start())
    return taken


class Start(NamedTuple):
    """How long a start took, in seconds of the clock and of the processor."""

    clock: float
    cpu: float


def _result(case: str, starts: list[Start]) -> dict[str, Any]:
    result: dict[str, Any] = {"case": case, "unit": "s", "measured": statistics.median(start.clock for start in starts)}
    result["cpu"] = statistics.median(start.cpu for start in starts)
    if case in LIMITS:
        result |= {"limit": LIMITS[case], "speedup": LIMITS[case] / result["measured"]}
    return result


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def _process(words: list[str]) -> Start:
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, *words]
    subprocess.run(command, cwd=ROOT, env=_environment(), check=True, stdout=subprocess.DEVNULL)
    clock, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Start(clock, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def _first_step(*overrides: str) -> Start:
    """Start the default run, wait for the checkpoint of its first step, and end it.

    Raises:
        RuntimeError: the run ended before.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output.txt"
        run_dir = Path(folder) / "runs" / "timed"
        words = ["-m", "dare_lightning", "fit", f"run_root={folder}/runs", f"run_dir={run_dir}", *overrides]
        started = time.perf_counter()
        with output.open("w") as stream:
            process = psutil.Popen(
                [sys.executable, *words], cwd=folder, env=_environment(), stdout=stream, stderr=subprocess.STDOUT
            )
            try:
                while not (run_dir / "checkpoints" / "step-00000001.ckpt").exists():
                    if process.poll() is not None:
                        raise RuntimeError(f"the run ended before its first step:\n{output.read_text()[-2000:]}")
                    if time.perf_counter() - started > PATIENCE:
                        print(f"no first step after {PATIENCE:g} s; that is what is counted", file=sys.stderr)
                        break
                    time.sleep(0.02)
                times = process.cpu_times()
                return Start(time.perf_counter() - started, times.user + times.system)
            finally:
                process.kill()
                process.wait(timeout=60)
