"""Tables of what the policy wrote, to look at while it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L

from dare_lightning.callbacks.artifacts import log_table


def log_samples(trainer: L.Trainer, stage: str, step: int, rows: Sequence[Mapping[str, Any]]) -> Path | None:
    """Write samples to `samples/<stage>-<step>.jsonl` in the run folder, and as a table to the tracking store.

    Args:
        stage: `val`, `rollout` or another word that names the source.
        step: optimiser steps done, so that each table has its own file.
        rows: one mapping a sample (prompt, completion, verdict, ...); none writes nothing.

    Returns:
        The file; None where nothing was written (no rows, another rank than 0, a full disk).
    """
    if not rows:
        return None
    return log_table(trainer, [{"step": step, **row} for row in rows], f"samples/{stage}-{step:08d}.jsonl")
