"""Seconds from the command to its first useful sign, as real processes."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.shared import ROOT

LIMITS = {"help": 3.0, "first training step": 20.0}
"""What the project holds itself to, in seconds on two idle cores."""


def run(quick: bool) -> list[dict[str, Any]]:
    """Measure help, composition and the default run up to the end of its first optimiser step.

    The first training step is taken when its checkpoint is on the disk, so loading, the first rollout, the validation
    before it and the saving are all in it.

    Returns:
        one dict a case: case, unit, measured; limit where there is one, speedup = limit / measured.
    """
    repeats = 1 if quick else 3
    cases = {"bare python": ["-c", "pass"], "import of torch": ["-c", "import torch"]}
    cases |= {
        "help": ["-m", "dare_lightning", "--help"],
        "fit --help": ["-m", "dare_lightning", "fit", "--help"],
        "fit --cfg job": ["-m", "dare_lightning", "fit", "--cfg", "job"],
    }
    results = [_result(case, [_process(words) for _ in range(repeats)]) for case, words in cases.items()]
    return [*results, _result("first training step", [_first_step() for _ in range(repeats)])]


def _result(case: str, seconds: list[float]) -> dict[str, Any]:
    result: dict[str, Any] = {"case": case, "unit": "s", "measured": statistics.median(seconds)}
    if case in LIMITS:
        result |= {"limit": LIMITS[case], "speedup": LIMITS[case] / result["measured"]}
    return result


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def _process(words: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *words], cwd=ROOT, env=_environment(), check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def _first_step(*overrides: str) -> float:
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
            process = subprocess.Popen(
                [sys.executable, *words], cwd=folder, env=_environment(), stdout=stream, stderr=subprocess.STDOUT
            )
            try:
                while not (run_dir / "checkpoints" / "step-00000001.ckpt").exists():
                    if process.poll() is not None:
                        raise RuntimeError(f"the run ended before its first step:\n{output.read_text()[-2000:]}")
                    time.sleep(0.02)
                return time.perf_counter() - started
            finally:
                process.terminate()
                process.wait(timeout=120)
