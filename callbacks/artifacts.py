"""Files a run leaves behind: always in the run folder, and in the tracking store where there is one."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L

from dare_lightning.callbacks.tracking import MLflowLogger

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)


def run_folder(trainer: L.Trainer) -> Path:
    """The run's folder: the MLflow logger's, else the trainer's `default_root_dir`."""
    for logger in trainer.loggers:
        if isinstance(logger, MLflowLogger):
            return logger.run_dir
    return Path(trainer.default_root_dir)


def log_text(trainer: L.Trainer, text: str, path: str) -> Path | None:
    """Write a text to `path` below the run folder, and record it.

    Returns:
        The file; None on ranks other than 0, and (with a warning) where it cannot be written.
    """
    return _write(trainer, path, text.encode("utf-8"))


def log_table(trainer: L.Trainer, rows: Sequence[Mapping[str, Any]], path: str) -> Path | None:
    """Write rows as JSON Lines to `path` (`*.jsonl`) below the run folder, and record them as a table.

    Values that JSON cannot hold are written as text. Returns as `log_text` does.
    """
    lines = "".join(json.dumps(dict(row), ensure_ascii=False, default=str) + "\n" for row in rows)
    return _write(trainer, path, lines.encode("utf-8", "replace"), table=True)


def log_figure(trainer: L.Trainer, figure: Figure, path: str) -> Path | None:
    """Save a matplotlib figure to `path` (`*.png`) below the run folder, and record it. Returns as `log_text` does."""
    import io

    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    return _write(trainer, path, image.getvalue())


def _write(trainer: L.Trainer, path: str, content: bytes, table: bool = False) -> Path | None:
    if not trainer.is_global_zero:
        return None
    file = run_folder(trainer) / path
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    except OSError as error:
        log.warning("cannot write %s (%s); the run goes on without it", file, error)
        return None
    folder = str(Path(path).parent)
    for logger in trainer.loggers:
        if isinstance(logger, MLflowLogger):
            logger.log_file(file, "" if folder == "." else folder, table)
    return file
