"""The program with a `fit` that ends in a moment, so that what surrounds a run can be tested alone.

Seed 1 raises one error, seed 2 another (neither once a file `mended` exists), seed 3 is interrupted, seed 4 dies.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path

from omegaconf import DictConfig

from dare_lightning.cli import app


def run(cfg: DictConfig, run_dir: Path) -> int:
    """Stands in for training."""
    logging.getLogger("dare_lightning").info("training with seed %s", cfg.seed)
    if cfg.seed == 1 and not Path("mended").exists():
        raise ValueError("loss is NaN at step 3")
    if cfg.seed == 2 and not Path("mended").exists():
        raise RuntimeError("the buffer is empty")
    if cfg.seed == 3:
        raise KeyboardInterrupt
    if cfg.seed == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    (run_dir / "result.json").write_text(json.dumps({"score": float(cfg.seed)}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    app.MODULES["fit"] = "tests.cli.program"
    sys.exit(app.main(sys.argv[1:]))
