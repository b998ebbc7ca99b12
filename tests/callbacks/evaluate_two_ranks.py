"""One of two processes that evaluate together: `python -m tests.callbacks.evaluate_two_ranks <data> <folder>`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from tests.callbacks.test_opencompass import ranks_benchmarks
from tests.equalities.conftest import Online, trainer


def main(data: Path, folder: Path) -> None:
    """Evaluate once as it should be, once with an operation that fails on rank 1; leave what this rank was told."""
    run, evaluation = Online(), ranks_benchmarks(data)
    strategy = DDPStrategy(process_group_backend="gloo")
    runner = trainer([evaluation], devices=2, strategy=strategy, default_root_dir=folder)
    runner.validate(run.method, datamodule=run.data, verbose=False)
    metrics = {
        name: float(value)
        for name, value in runner.callback_metrics.items()
        if name.startswith("eval/") and "seconds" not in name
    }
    rank = os.environ["RANK"]

    def failing(asked: Any) -> list[Any]:
        if rank == "1":
            raise ValueError("only here")
        return [("1", 1) for _ in asked]

    assert evaluation._service is not None
    evaluation._service.operations["sudoku"] = failing
    evaluation.on_error, evaluation.suite.benchmarks = "raise", {"sudoku": evaluation.suite.benchmarks["sudoku"]}
    failure = ""
    try:
        evaluation.evaluate(runner, run.method)
    except RuntimeError as error:
        failure = str(error)
    (folder / f"rank{rank}.json").write_text(json.dumps({"metrics": metrics, "failure": failure}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
