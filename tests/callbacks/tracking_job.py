"""A run that logs one number: `python -m tests.callbacks.tracking_job <folder> <name>`; the one named "dies" does."""

from __future__ import annotations

import sys

from dare_lightning.callbacks.tracking import MLflowLogger

if __name__ == "__main__":
    folder, name = sys.argv[1:]
    logger = MLflowLogger(save_dir=folder, run_dir=f"{folder}/{name}")
    logger.log_config({"job": name})
    logger.log_metrics({"loss": 1.0}, 0)
    if name == "dies":
        raise RuntimeError("no data")
    logger.finalize("success")
