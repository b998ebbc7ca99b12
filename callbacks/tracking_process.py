"""A tracked run in a process of its own: MLflow takes seconds of Python to import and to make a database.

In a thread that would hold up every operation of the training loop, which needs the interpreter in between. The
process reads requests from its standard input and answers on its standard output, both pickled; it ends when its input
does, so it outlives a killed run by one request at most.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

from dare_lightning.callbacks.tracking_store import StoreSettings, TrackedRun, open_client
from dare_lightning.callbacks.tracking_writer import Record, RecordRejected, StoreUnreachable

log = logging.getLogger(__name__)

_NICENESS = 5
_early: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True)
class _Answer:
    """What the process says: the run's id, or what went wrong; and what was logged meanwhile."""

    run_id: str | None
    unreachable: str = ""
    rejected: str = ""
    logged: tuple[tuple[int, str], ...] = ()


class ProcessRun:
    """A `TrackedRun` whose store is opened and written by another process; the writer's sink.

    A process that dies is started again by the next call, and goes on with the same run.

    Args:
        settings, origin, on_ready: as for `TrackedRun`.
    """

    def __init__(
        self, settings: StoreSettings, origin: Callable[[], dict[str, str]], on_ready: Callable[[str], None]
    ) -> None:
        self.settings = settings
        self.run_id = settings.run_id
        self._origin = origin
        self._on_ready = on_ready
        self._process: subprocess.Popen[bytes] | None = None
        self._client: Any = None
        self._connected = False
        self._asking = threading.Lock()

    @property
    def client(self) -> Any:
        """An MlflowClient in this process; None until the run is there. The first use imports MLflow."""
        if self._client is None and self._connected:
            self._client = open_client(self.settings.tracking_uri)
        return self._client

    def connect(self) -> None:
        """Start the process, open the store and the run."""
        if self._process is None or self._process.poll() is not None:
            self._process = _early.pop() if _early else _start()
        self.run_id = self._ask((replace(self.settings, run_id=self.run_id), self._origin()))
        self._connected = True
        assert self.run_id is not None
        self._on_ready(self.run_id)

    def write(self, records: Sequence[Record]) -> None:
        """Store the records."""
        if self._process is None or self._process.poll() is not None:
            self.connect()
        self._ask(list(records))

    def stop(self) -> None:
        """Let the process end once it has done what it was asked."""
        if self._process is not None and self._asking.acquire(blocking=False):
            try:
                _pipe(self._process.stdin).close()
                self._process.wait(timeout=10)
            except (OSError, subprocess.TimeoutExpired) as error:
                log.info("the tracking process did not end: %s", error)
            finally:
                self._asking.release()

    def _ask(self, request: object) -> str | None:
        assert self._process is not None
        try:
            with self._asking:
                pickle.dump(request, _pipe(self._process.stdin))
                _pipe(self._process.stdin).flush()
                answer: _Answer = pickle.load(_pipe(self._process.stdout))
        except (OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
            self._process.kill()
            status = self._process.wait()
            raise StoreUnreachable(f"the tracking process ended with status {status}") from error
        for level, message in answer.logged:
            log.log(level, "%s", message)
        if answer.unreachable:
            raise StoreUnreachable(answer.unreachable)
        if answer.rejected:
            raise RecordRejected(answer.rejected)
        return answer.run_id


def start_early(tracking_uri: str) -> None:
    """Start the process before there is a run, so that MLflow and the store are ready when it comes.

    The next `ProcessRun` takes it over.

    Args:
        tracking_uri: the store that the run will be in.
    """
    if not _early:
        _early.append(_start(tracking_uri))


def _start(tracking_uri: str = "") -> subprocess.Popen[bytes]:
    # Found wherever this package was found, and not stopped with this process by Ctrl-C: it still has to say so.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import main; main()", tracking_uri],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None  # both were asked for
    return pipe


class _Kept(logging.Handler):
    """Keeps messages for the process that asked."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self.messages.append((record.levelno, record.getMessage()))

    def take(self) -> tuple[tuple[int, str], ...]:
        """What came since the last time."""
        taken, self.messages = tuple(self.messages), []
        return taken


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer requests until there are no more: (settings, tags) opens a run, a list of records is written to it."""
    kept = _Kept()
    logging.getLogger("dare_lightning").addHandler(kept)
    run: TrackedRun | None = None
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        try:
            if isinstance(request, tuple):
                settings, tags = request
                run = TrackedRun(settings, lambda tags=tags: tags, lambda run_id: None)  # type: ignore[misc]
                run.connect()
            else:
                assert run is not None
                run.write(request)
            answer = _Answer(run.run_id, logged=kept.take())
        except StoreUnreachable as error:
            answer = _Answer(None, unreachable=str(error), logged=kept.take())
        except RecordRejected as error:
            answer = _Answer(None, rejected=str(error), logged=kept.take())
        try:
            pickle.dump(answer, answers)
            answers.flush()
        except BrokenPipeError:
            return


def main() -> None:
    """The process."""
    # The run that is stopped still has to be recorded as stopped.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform != "win32":
        os.nice(_NICENESS)
    answers = os.fdopen(os.dup(1), "wb")
    # What MLflow prints must not come between the answers.
    os.dup2(2, 1)
    if uri := sys.argv[1]:
        with contextlib.suppress(StoreUnreachable):  # whoever opens the run hears of it
            open_client(uri)
    serve(sys.stdin.buffer, answers)
