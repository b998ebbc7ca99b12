"""The main process's end of the sandbox: any thread and any process may call it."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dare_lightning.rewards.sandbox.jail import LEVELS, Level, Limits
from dare_lightning.rewards.sandbox.removal import remove_quietly
from dare_lightning.rewards.server import Server, ServerError

_log = logging.getLogger(__name__)

Wanted = Literal["auto", "bubblewrap", "namespaces", "filters", "limits"]

START_LIMIT_S = 180.0
SLACK_S = 60.0
"""Beyond the sum of its programs' limits a batch gets this long before the whole worker counts as hung."""
GRACE_S = 5.0
BOOT = "import sys; sys.path.append(sys.argv[2]); from dare_lightning.rewards.sandbox.worker import main; main()"
_KEPT = ("LD_LIBRARY_PATH", "PATH", "TMPDIR")  # what Python may need to start, and to find bubblewrap
_ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "MALLOC_ARENA_MAX": "2",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}


class SandboxError(RuntimeError):
    """Programs cannot be run as they should be."""


@dataclass(frozen=True)
class Protection:
    """How programs are shut in, as found by trying it.

    Attributes:
        level: "bubblewrap" and "namespaces" hide everything outside, "filters" forbids it, "limits" bounds resources.
        holds: for network, files, signals, memory and processes, whether a trial program failed to get through.
        user: whether programs run under a user id of their own.
        refused: why a stronger level was not taken.
    """

    level: Level
    holds: Mapping[str, bool]
    user: bool
    refused: Mapping[str, str]

    def __str__(self) -> str:
        held = ", ".join(name for name, value in self.holds.items() if value)
        missing = ", ".join(name for name, value in self.holds.items() if not value)
        own = ", under a user of their own" if self.user else ""
        return f"{self.level}{own}; contained: {held}" + (f"; NOT contained: {missing}" if missing else "")


class Sandbox:
    """Runs programs against tests in processes of our own.

    They are started at the first call, stay warm, and end with `close`, with the object or with the program. A batch
    of n programs takes at most 3 + ceil(n / workers) time limits, whatever it holds. Linux only.

    Args:
        limits: bounds of each program.
        workers: programs that run at the same time. More than there are cores is sensible: no more of them start at
            once than two for each core, the others bound how long programs that hang can hold up a batch.
        protection: "auto" is the strongest level that works here; a level is exactly that one, or an error.
        packages: whether programs may import installed packages beside the standard library.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(self, limits: Limits, workers: int, protection: Wanted = "auto", packages: bool = False) -> None:
        if min(asdict(limits).values()) <= 0 or workers < 1:
            raise ValueError(f"{limits}, workers={workers}: all must be positive")
        if protection not in ("auto", *LEVELS):
            raise ValueError(f"protection={protection!r} is not known; choose one of auto, {', '.join(LEVELS)}")
        self.limits = limits
        self.workers = workers
        self.wanted = protection
        self.packages = packages
        self._protection: Protection | None = None
        self._server: Server | None = None
        self._folder = ""
        self._lock = threading.Lock()
        self._owner = os.getpid()

    @property
    def protection(self) -> Protection:
        """How programs are shut in. Starts the processes where they do not run yet.

        Raises:
            SandboxError: the wanted level does not work here.
        """
        self._forget_fork()
        with self._lock:
            try:
                self._running()
            except ServerError as error:
                self._stop()
                raise SandboxError(str(error)) from error
            assert self._protection is not None
            return self._protection

    @property
    def pid(self) -> int | None:
        """Process id of the worker, None where it does not run."""
        return None if self._server is None else self._server.pid

    def judge(self, jobs: Sequence[tuple[Sequence[str], int]], tests: Sequence[Mapping[str, Any]]) -> list[str]:
        """Status of each job: "right", "wrong", "unparsed", "timeout" or "excluded".

        Args:
            jobs: for each, programs of which the first that is Python counts, and the number of its tests.
            tests: of the kind "asserts", "calls" or "inputs", as `read_tests` makes them.

        Raises:
            SandboxError: the wanted level does not work here, or the processes failed twice in a row.
        """
        if not jobs:
            return []
        self._forget_fork()
        with self._lock:
            try:
                return self._ask(jobs, tests)
            except ServerError as error:
                _log.warning("%s; starting it again", error)
                self._stop()
            try:
                return self._ask(jobs, tests)
            except ServerError as error:
                self._stop()
                raise SandboxError(str(error)) from error

    def close(self) -> None:
        """End the processes. A later call starts new ones."""
        self._forget_fork()
        with self._lock:
            self._stop()

    def _ask(self, jobs: Sequence[tuple[Sequence[str], int]], tests: Sequence[Mapping[str, Any]]) -> list[str]:
        rounds = math.ceil(len(jobs) / self.workers) + 4
        limit = rounds * (self.limits.timeout_s + 1.0) + SLACK_S
        answer = self._running().ask({"jobs": list(jobs), "tests": list(tests)}, limit)
        if isinstance(answer, dict):
            raise ServerError(f"the sandbox failed: {answer['error']}")
        return [str(status) for status in answer]

    def _running(self) -> Server:
        if self._server is not None:
            return self._server
        if sys.platform != "linux":
            raise SandboxError(f"generated programs can be contained on Linux only, this is {sys.platform}")
        self._folder = tempfile.mkdtemp(prefix="dare-sandbox-")
        root = str(Path(__file__).resolve().parents[3])
        settings = {
            "limits": asdict(self.limits),
            "workers": self.workers,
            "protection": self.wanted,
            "packages": self.packages,
            "code_root": root,
            "folder": self._folder,
        }
        command = [sys.executable, "-P", "-s", "-B", *([] if self.packages else ["-S"]), "-c", BOOT]
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        environment = {**kept, **_ENVIRONMENT}
        server = Server([*command, json.dumps(settings), root], environment, "sandbox", GRACE_S)
        self._server = server
        answer = server.receive(START_LIMIT_S)
        if "error" in answer:
            self._stop()
            raise SandboxError(self._no_level(answer["error"]))
        self._protection = Protection(**answer["protection"])
        level = logging.INFO if all(self._protection.holds.values()) else logging.WARNING
        _log.log(level, "generated programs run in %s", self._protection)
        return server

    def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
            # The worker removes it, unless it was killed.
            remove_quietly(self._folder)

    def _no_level(self, reasons: str) -> str:
        asked = "none of the levels works" if self.wanted == "auto" else f"protection={self.wanted} does not work"
        return (
            f"generated programs cannot be contained as asked: {asked} here ({reasons}). Install bubblewrap, allow "
            "user namespaces, run as a user who is not root, or choose protection=auto"
        )

    def _forget_fork(self) -> None:
        """In a forked copy the processes and the lock are the parent's: start afresh."""
        if self._owner != os.getpid():
            self._owner = os.getpid()
            self._lock = threading.Lock()
            self._server = None
