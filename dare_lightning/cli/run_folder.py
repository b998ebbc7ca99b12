"""A run's own folder: its configuration, its log, and how it ended."""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dare_lightning.cli.console import fail, say
from dare_lightning.cli.errors import UserError

RUN_DIR_VARIABLE = "DARE_RUN_DIR"
"""Set by rank 0, so that the ranks it starts share its folder."""
INTERRUPTED = 130
TERMINATED = 143

_OWN_FILES = {"config.yaml", "overrides.txt", "composed.json", "status.json", "job.log"}
# Errors whose message says what to do.
_EXPLAINED = (UserError, ValueError, OSError, ImportError)

log = logging.getLogger("dare_lightning")


def new_folder(root: Path, command: str, prefix: str = "") -> Path:
    """Make `<root>/<command>/<prefix><date>_<time>`, numbered where another run started in the same second."""
    parent = root / command
    parent.mkdir(parents=True, exist_ok=True)
    stamp = f"{prefix}{datetime.now():%Y-%m-%d_%H-%M-%S}"
    number = 1
    while True:
        folder = parent / (stamp if number == 1 else f"{stamp}_{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def run_folder(cfg: DictConfig, command: str) -> Path:
    """This run's folder: the one asked for, the one rank 0 made, or a new one.

    Raises:
        UserError: several ranks were started from outside and would each make their own.
    """
    if cfg.run_dir is not None:
        folder = Path(cfg.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
    elif rank() > 0 and RUN_DIR_VARIABLE in os.environ:
        folder = Path(os.environ[RUN_DIR_VARIABLE])
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "several ranks were started from outside: add run_dir=..., so that all of them share one folder"
        )
    else:
        folder = new_folder(Path(cfg.run_root), command)
    os.environ[RUN_DIR_VARIABLE] = str(folder)
    return folder


def warn_of_earlier_run(run_dir: str | None) -> None:
    """Say that a run starts anew in a folder where there was one already, and how to go on with that one instead."""
    if run_dir is None or not (Path(run_dir) / "status.json").is_file():
        return
    saved = Path(run_dir) / "checkpoints"
    go_on = shlex.quote(f"ckpt_path={saved}")
    way_out = f"to go on with that one, add {go_on}" if any(saved.glob("*.ckpt")) else "it left no checkpoint"
    say(f"warning: run_dir={run_dir} holds an earlier run and this one starts anew; {way_out}")


def write_beside_earlier(file: Path, text: str) -> None:
    """Write a file; one of this name with another content becomes `<name>.1.<suffix>`, the next `.2`, and so on."""
    if file.exists() and file.read_text(encoding="utf-8") != text:
        number = 1 + sum(1 for _ in file.parent.glob(f"{file.stem}.*{file.suffix}"))
        file.rename(file.with_name(f"{file.stem}.{number}{file.suffix}"))
    file.write_text(text, encoding="utf-8")


def rank() -> int:
    """This process's number among those that train together; 0 where it is alone."""
    return int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0)


class Run:
    """Context of one run: logs to `job.log`, writes `status.json`, and turns an error into an exit status.

    An error is logged with its traceback and shown in one line; it does not leave the block.

    Args:
        folder: the run's folder, which exists.
        command, words: what was asked for, kept for a rerun.
        show_traceback: print the traceback of an error as well.
        new: whether the folder was made for this run; it goes again where a mistake keeps the run from starting.
    """

    def __init__(
        self, folder: Path, command: str, words: Sequence[str], show_traceback: bool = False, new: bool = False
    ) -> None:
        self.folder = folder
        self.command = command
        self.words = list(words)
        self.show_traceback = show_traceback
        self.new = new
        self.exit_code = 0
        name = "job.log" if rank() == 0 else f"job.rank{rank()}.log"
        self._file = logging.FileHandler(folder / name, encoding="utf-8")

    def save_config(self, cfg: DictConfig) -> None:
        """Write `config.yaml`, interpolations resolved, and `overrides.txt`, as typed; earlier ones stay."""
        if rank() == 0:
            write_beside_earlier(self.folder / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))
            write_beside_earlier(self.folder / "overrides.txt", "".join(f"{word}\n" for word in self.words))

    def __enter__(self) -> Run:
        self._file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root = logging.getLogger()
        root.addHandler(self._file)
        if len(root.handlers) == 1:
            root.addHandler(_console_handler())
        log.setLevel(logging.INFO)
        logging.captureWarnings(True)
        self._started = time.time()
        self._write_status("running")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        status, message = "finished", ""
        if error is not None:
            status, message = self._failed(error)
        elif self.exit_code != 0:
            status, message = "failed", f"exit status {self.exit_code}"
        self._write_status(status, message)
        logging.getLogger().removeHandler(self._file)
        self._file.close()
        if self.new and error is not None and _kept_from_starting(error):
            self._remove()
        return True

    def _remove(self) -> None:
        """Take the folder away, and those above it that were made for it, unless something else lies there."""
        if rank() > 0 or {path.name for path in self.folder.iterdir()} - _OWN_FILES:
            return
        shutil.rmtree(self.folder)
        in_use = (Path.cwd(), *Path.cwd().parents)
        for parent in list(self.folder.parents)[:2]:  # the command's, and that of all runs
            if parent.resolve() in in_use or any(parent.iterdir()):
                break
            parent.rmdir()

    def _failed(self, error: BaseException) -> tuple[str, str]:
        details = "".join(traceback.format_exception(error))
        stopped = isinstance(error, SystemExit)
        cause = error.__context__ if stopped else error
        if isinstance(cause, KeyboardInterrupt):
            self.exit_code = INTERRUPTED
            self._log_to_file(logging.WARNING, "interrupted")
            say(f"interrupted; what was saved is in {self.folder}")
            return "interrupted", "interrupted"
        if isinstance(error, SystemExit) and error.code == TERMINATED:
            self.exit_code = TERMINATED
            self._log_to_file(logging.WARNING, "terminated")
            say(f"terminated; what was saved is in {self.folder}")
            return "interrupted", "terminated"
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return "finished", ""
        self.exit_code = 2 if _kept_from_starting(error) else 1
        message = describe(error)
        self._log_to_file(logging.ERROR, f"{message}\n{details}")
        fail(message, details if self.show_traceback else None)
        if not self.show_traceback and not (self.new and _kept_from_starting(error)):
            say(f"the traceback is in {self._file.baseFilename}")
        return "failed", message

    def _log_to_file(self, level: int, message: str) -> None:
        self._file.handle(logging.LogRecord("dare_lightning", level, __file__, 0, message, None, None))

    def _write_status(self, status: str, error: str = "") -> None:
        if rank() > 0:
            return
        content: dict[str, Any] = {
            "status": status,
            "command": self.command,
            "overrides": self.words,
            "error": error,
            "exit_code": self.exit_code,
            "seconds": round(time.time() - self._started, 1),
            "process": os.getpid(),
        }
        (self.folder / "status.json").write_text(json.dumps(content, indent=2), encoding="utf-8")


def _while_building(error: BaseException) -> bool:
    return type(error).__module__.startswith("hydra.") and error.__cause__ is not None


def _innermost(error: BaseException) -> BaseException:
    while _while_building(error):
        assert error.__cause__ is not None
        error = error.__cause__
    return error


def _kept_from_starting(error: BaseException) -> bool:
    """Whether a mistake that its message explains came up before there was anything to run."""
    return isinstance(error, UserError) or (_while_building(error) and isinstance(_innermost(error), _EXPLAINED))


def describe(error: BaseException) -> str:
    """One readable message: the innermost cause of an error while building an object, named with its key."""
    cause = _innermost(error)
    text = str(cause).strip() or "no message"
    message = text if isinstance(cause, _EXPLAINED) else f"{type(cause).__name__}: {text}"
    if cause is error:
        return message
    where = [line.split(":", 1)[1].strip() for line in str(error).splitlines() if line.startswith("full_key:")]
    return f"{where[0]}: {message}" if where else message


def _console_handler() -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    return handler
