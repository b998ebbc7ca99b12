"""Every measurement that can be repeated, as ratios against a stated baseline.

Run from the checkout: python -m benchmarks [--quick] [--only sampler,packing] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import block, decoding, memory, packing, rows, sampler, startup, training
from benchmarks.machine import machine

GROUPS: dict[str, Callable[[bool], list[dict[str, Any]]]] = {
    "sampler": sampler.run,
    "decoding": decoding.run,
    "block": block.run,
    "training": training.run,
    "packing": packing.run,
    "memory": memory.run,
    "rows": rows.run,
    "startup": startup.run,
}
BASELINES = {
    "sampler": "the published procedure written plainly, every row and position in every step; tokens a second",
    "decoding": "the published procedure written plainly, one token a step, on the embedded task; seconds",
    "block": "the prefix anew for every step, dense [noisy ; clean] for every row, all logits; seconds",
    "packing": "padded to the longest row, attention written out, all logits; seconds of a supervised step",
    "training": "the same step without the saving; seconds",
    "memory": "the logits of all scored positions at once; MB that forward and backward pass add",
    "rows": "all rows in one graph (gradient_plan=single); MB that a training step adds",
    "startup": "the limit that the project sets itself; seconds",
}


def table(group: str, results: Sequence[dict[str, Any]]) -> str:
    """The results of a group as a Markdown table."""
    lines = [f"{group}: against {BASELINES[group]}", "", "| case | baseline | measured | ratio |", "|---|---|---|---|"]
    for result in results:
        if group == "sampler":
            before, after = (f"{result[side]['tokens_per_second']:.0f}" for side in ("plain", "builtin"))
        else:
            known = result.get("baseline", result.get("limit"))
            before = "" if known is None else f"{known:.3g}"
            after = f"{result['measured']:.3g}"
        ratio = f"{result['speedup']:.2f}x" if "speedup" in result else ""
        cpu = f" ({result['cpu']:.3g} s of processor time)" if "cpu" in result else ""
        lines.append(f"| {result['case']}{cpu} | {before} | {after} | {ratio} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, few repeats: does it run?")
    parser.add_argument("--only", metavar="GROUPS", default=",".join(GROUPS), help="comma-separated: %(default)s")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything that was measured")
    options = parser.parse_args(argv)
    chosen = options.only.split(",")
    if unknown := [name for name in chosen if name not in GROUPS]:
        parser.error(f"--only {','.join(unknown)}: there are {', '.join(GROUPS)}")
    found = machine()
    print(", ".join(f"{name} {value}" for name, value in found.items() if value is not None), flush=True)
    if found["load"] > 0.5:
        print(f"warning: the machine is busy (load {found['load']}); the ratios are uncertain", file=sys.stderr)
    results = {}
    for name in chosen:
        results[name] = GROUPS[name](options.quick)
        print(f"\n{table(name, results[name])}", flush=True)
    if options.json is not None:
        content = {"machine": found, "quick": options.quick, "results": results}
        options.json.write_text(json.dumps(content, indent=2), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
