"""The program with a `fit` that ends in a moment, so that what surrounds a run can be tested alone.

Seed 1 raises one error, seed 2 another (neither once a file `mended` exists), seed 3 is interrupted, seed 4 dies, and
with seed 5 a part cannot be built.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig

from dare_lightning.cli import app


class Uneven:
    """A part that cannot be built."""

    def __init__(self) -> None:
        raise ValueError("the sizes do not divide")


def run(cfg: DictConfig, run_dir: Path) -> int:
    """Stands in for training."""
    logging.getLogger("dare_lightning").info("training with seed %s", cfg.seed)
    if cfg.seed == 1 and not Path("mended").exists():
        raise ValueError("loss is NaN at step 3")
    if cfg.seed == 2 and not Path("mended").exists():
        raise RuntimeError("the buffer is empty")
    if cfg.seed == 3:
        raise KeyboardInterrupt
    if cfg.seed == 5:
        instantiate({"data": {"_target_": "tests.cli.program.Uneven"}})
    if cfg.seed == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    (run_dir / "result.json").write_text(json.dumps({"score": float(cfg.seed)}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    app.MODULES["fit"] = "tests.cli.program"
    sys.exit(app.main(sys.argv[1:]))
