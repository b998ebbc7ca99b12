"""One of two processes that train together: `python -m tests.equalities.two_ranks <folder>`.

The launcher's environment says which one this is. Rank 0 leaves `two.pt` in the folder.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy

from dare_lightning.callbacks.budget import Budget
from dare_lightning.parallel.collectives import rank_and_world
from tests.equalities.conftest import Keep, Record, weights
from tests.equalities.runs import RUNS

INSIDE, BOUNDARY = "inside-3.ckpt", "boundary-4.ckpt"


def fit(name: str, folder: Path, resume: Path | None = None) -> dict[str, Any]:
    """Weights and metrics of one of `RUNS`, over two processes; a fresh one leaves checkpoints in `folder/name`."""
    run, record, keep = RUNS[name](), Record(), Keep(folder / name, at=[3, 4] if resume is None else [])
    run.fit(
        keep,
        Budget(),
        ckpt_path=resume,
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        logger=record,
        default_root_dir=folder,
    )
    return {"weights": weights(run), "steps": record.steps, "seen": keep.seen}


def main(folder: Path) -> None:
    """Train everything twice where a resume is to be compared."""
    results = {name: fit(name, folder) for name in RUNS}
    results["resumed"] = fit("online", folder, folder / "online" / INSIDE)
    if rank_and_world()[0] == 0:
        torch.save(results, folder / "two.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
