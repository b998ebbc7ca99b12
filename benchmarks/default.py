"""What the embedded default gains: `fit` without arguments, once for each seed.

Run from the checkout: python -m benchmarks.default [--seeds 42,43,44] [--json FILE] [OVERRIDE ...]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import machine

METRIC = "val/solve_rate"


def run(seed: int, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Seconds of the whole command, and the first and last held-out solve rate."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "dare_lightning",
            "fit",
            f"seed={seed}",
            f"run_root={folder}",
            f"run_dir={folder}/run",
        ]
        started = time.perf_counter()
        subprocess.run([*command, *overrides], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        seconds = time.perf_counter() - started
        history = json.loads((Path(folder) / "run" / "history.json").read_text(encoding="utf-8"))[METRIC]
    curve = [value for _, value in sorted((int(done), value) for done, value in history.items())]
    return {"seed": seed, "before": curve[0], "after": curve[-1], "gain": curve[-1] - curve[0], "seconds": seconds}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a Markdown table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.default", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="42,43,44", help="comma-separated: %(default)s")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything that was measured")
    parser.add_argument("overrides", nargs="*", help="further overrides of fit")
    options = parser.parse_args(argv)
    print(", ".join(f"{name} {value}" for name, value in machine().items() if value is not None), flush=True)
    print("| seed | held-out solve rate before | after | gain | whole command |\n|---|---|---|---|---|", flush=True)
    results = []
    for seed in options.seeds.split(","):
        result = run(int(seed), options.overrides)
        results.append(result)
        print("| {seed} | {before:.3f} | {after:.3f} | {gain:+.3f} | {seconds:.0f} s |".format(**result), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine(), "results": results}, indent=2), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
