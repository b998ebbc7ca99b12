"""Methods side by side: the held-out solve rate of finished runs against the forward passes they made.

Reads the folders of `fit -m ... logger=csv`, prints a Markdown table and draws one panel a method.

Run from the checkout: python -m benchmarks.compare FOLDER [FOLDER ...] [--plot FILE.png]
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

METRIC = "val/solve_rate"
COST = "cost/passes"


@dataclass(frozen=True)
class Run:
    """One finished run.

    Attributes:
        method, seed: from its overrides.
        curve: (forward passes made, held-out solve rate), from 0 passes on.
        rollouts: how many there were.
        rollout_passes, training_passes, tokens: what they cost in the end.
    """

    method: str
    seed: int
    curve: tuple[tuple[float, float], ...]
    rollouts: int
    rollout_passes: float
    training_passes: float
    tokens: float

    @property
    def gain(self) -> float:
        """Last held-out solve rate minus the first."""
        return self.curve[-1][1] - self.curve[0][1]

    def at(self, passes: float) -> float:
        """The solve rate at this cost, on the line between measurements."""
        for (left, low), (right, high) in zip(self.curve, self.curve[1:], strict=False):
            if passes <= right:
                return low + (high - low) * (passes - left) / (right - left)
        return self.curve[-1][1]


def read_run(folder: Path) -> Run:
    """A run from its folder.

    Raises:
        ValueError: it was not validated at least twice, or has no costs.
    """
    lines = (folder / "overrides.txt").read_text(encoding="utf-8").splitlines()
    overrides = dict(line.split("=", 1) for line in lines if "=" in line)
    with (folder / "csv" / "metrics.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    costs = {int(row["step"]): row for row in rows if row.get(COST)}
    points = [(int(row["step"]), float(row[METRIC])) for row in rows if row.get(METRIC)]
    if len(points) < 2 or not costs:
        raise ValueError(f"{folder} holds {len(points)} held-out scores and {len(costs)} costs: is the run finished?")
    # The first score is taken before anything was spent; the others at the end of a rollout, as its cost is.
    curve = [(0.0, points[0][1]), *((float(costs[step][COST]), value) for step, value in points[1:])]
    last = costs[max(costs)]
    return Run(
        method=overrides["method"],
        seed=int(overrides["seed"]),
        curve=tuple(curve),
        rollouts=len(costs),
        rollout_passes=float(last["cost/rollout_passes"]),
        training_passes=float(last["cost/training_passes"]),
        tokens=float(last["cost/tokens"]),
    )


def find_runs(folders: Iterable[Path]) -> dict[str, list[Run]]:
    """Every finished run below these folders, by method, in the order of their mean gain, best first."""
    found: dict[str, list[Run]] = {}
    for folder in folders:
        for path in sorted(folder.rglob("overrides.txt")):
            if (path.parent / "csv" / "metrics.csv").is_file():
                run = read_run(path.parent)
                found.setdefault(run.method, []).append(run)
    return dict(sorted(found.items(), key=lambda item: -statistics.mean(run.gain for run in item[1])))


def table(methods: dict[str, list[Run]]) -> str:
    """A line for each method; gains are of the held-out solve rate, one for each seed."""
    lines = [
        "| method | start | end | mean gain | spread | gain by seed | rollouts | passes: rollouts + training |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for method, runs in methods.items():
        gains = [run.gain for run in runs]
        spread = f"{statistics.stdev(gains):.3f}" if len(gains) > 1 else ""
        each = ", ".join(f"{run.seed}: {run.gain:+.3f}" for run in sorted(runs, key=lambda run: run.seed))
        start, end = (statistics.mean(run.curve[place][1] for run in runs) for place in (0, -1))
        rollouts = statistics.mean(run.rollouts for run in runs)
        passes = " + ".join(
            f"{statistics.mean(values):,.0f}"
            for values in ([run.rollout_passes for run in runs], [run.training_passes for run in runs])
        )
        lines.append(
            f"| `{method}` | {start:.3f} | {end:.3f} | {statistics.mean(gains):+.3f} | {spread} | {each} |"
            f" {rollouts:.0f} | {passes} |"
        )
    return "\n".join(lines)


def plot(methods: dict[str, list[Run]], path: Path) -> None:
    """One panel a method: mean over seeds, and the range from the lowest to the highest."""
    from matplotlib.figure import Figure

    columns = 4
    rows = -(-len(methods) // columns)
    figure = Figure(figsize=(3 * columns, 2.4 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[len(methods) :]:
        axes.set_visible(False)
    for axes, (method, runs) in zip(grid.flat, methods.items(), strict=False):
        end = min(run.curve[-1][0] for run in runs)
        places = [end * step / 60 for step in range(61)]
        curves = [[run.at(place) for place in places] for run in runs]
        lowest, highest = ([bound(values) for values in zip(*curves, strict=True)] for bound in (min, max))
        thousands = [place / 1000 for place in places]
        axes.fill_between(thousands, lowest, highest, alpha=0.25)
        axes.plot(thousands, [statistics.mean(values) for values in zip(*curves, strict=True)])
        axes.set_title(method, fontsize=9)
        axes.grid(alpha=0.3)
    figure.supxlabel("forward passes, thousands")
    figure.supylabel("held-out solve rate")
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, draw the plot; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, help="run folders, or folders of them")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the curves")
    options = parser.parse_args(argv)
    methods = find_runs(options.folders)
    if not methods:
        parser.error("no run with csv/metrics.csv there; train with logger=csv")
    print(table(methods))
    if options.plot is not None:
        plot(methods, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
