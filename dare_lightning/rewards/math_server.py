"""The main process's end of `math_worker`: starts it, talks to it, and leaves nothing behind."""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

START_LIMIT_S = 120.0
SLACK_S = 10.0
"""Beyond the sum of its items' limits a batch gets this long before the whole worker counts as hung."""


class MathServerError(RuntimeError):
    """The worker could not start, died or hung."""


class MathServer:
    """One worker process in a session of its own, so that Ctrl-C reaches it through us alone.

    Not `multiprocessing`: a daemonic process may not have children there, and a data loader's worker is one.
    """

    def __init__(self, timeout_s: float, workers: int) -> None:
        self.timeout_s = timeout_s
        self.workers = workers
        self.owner = os.getpid()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        # By path and without the script's folder on sys.path: a module named `math` lies beside it.
        script = str(Path(__file__).with_name("math_worker.py"))
        self._process = subprocess.Popen(
            [sys.executable, "-P", script, str(timeout_s), str(workers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self._buffer = b""
        self._ready = False
        self._finalizer = weakref.finalize(self, _end, self._process, self.owner)

    def judge(self, pairs: Sequence[tuple[str, str]]) -> list[str]:
        """Status of each (gold, answer).

        Raises:
            MathServerError: the worker is gone or hung; it is closed.
        """
        try:
            if not self._ready:
                self._receive(START_LIMIT_S)
                self._ready = True
            self._send(pairs)
            rounds = math.ceil(len(pairs) / self.workers) + 4
            statuses = self._receive(rounds * self.timeout_s + SLACK_S)
        except (OSError, MathServerError) as error:
            tail = self._error_tail()
            self.close()
            raise MathServerError(
                f"the math checking process failed: {error}. Its last words: {tail or '-'}"
            ) from error
        return [str(status) for status in statuses]

    def close(self) -> None:
        """End the worker and its runners, and wait until they are gone. Safe to call twice."""
        self._finalizer()
        self._errors.close()

    def _send(self, pairs: Sequence[tuple[str, str]]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(pairs).encode() + b"\n")
        self._process.stdin.flush()

    def _receive(self, limit_s: float) -> list[str]:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise MathServerError(f"no reply within {limit_s:.0f} s")
                chunk = os.read(descriptor, 1 << 16)
                if not chunk:
                    raise MathServerError("it ended")
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        reply: list[str] = json.loads(line)
        return reply

    def _error_tail(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-500:].decode(errors="replace").strip()


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """Close the pipes; in the process that started the worker also kill its whole session and reap it."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            try:
                stream.close()
            except BrokenPipeError:
                continue  # closing flushes, and the worker may be gone already
    if os.getpid() != owner:
        return  # a fork's copy: the worker belongs to the parent
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
