"""A process of ours that does what must not happen in the main one: started, talked to, and left without a trace."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any


class ServerError(RuntimeError):
    """The process could not start, died or hung."""


class Server:
    """One process in a session of its own, so that Ctrl-C reaches it through us alone; it speaks JSON lines.

    Not `multiprocessing`: a daemonic process may not have children there, and a data loader's worker is one.

    Args:
        command: what to start.
        environment: all its environment variables.
        name: how messages call it.
        grace_s: how long it may take to end by itself once its input has ended.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], name: str, grace_s: float = 0.0) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=dict(environment),
            start_new_session=True,
        )
        self._buffer = b""
        self._finalizer = weakref.finalize(self, _end, self._process, os.getpid(), grace_s)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def ask(self, message: object, limit_s: float) -> Any:
        """Send a message and wait for the answer.

        Raises:
            ServerError: the process is gone or hung; it is closed.
        """
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
            return self._receive(limit_s)
        except (OSError, ServerError) as error:
            raise self._failed(error) from error

    def receive(self, limit_s: float) -> Any:
        """Wait for a message that nobody asked for: the first one, which says that the process is ready.

        Raises:
            ServerError: the process is gone or hung; it is closed.
        """
        try:
            return self._receive(limit_s)
        except (OSError, ServerError) as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """End the process and its session, and wait until they are gone. Safe to call twice."""
        self._finalizer()
        self._errors.close()

    def _failed(self, error: Exception) -> ServerError:
        self._errors.seek(0)
        tail = self._errors.read()[-500:].decode(errors="replace").strip()
        self.close()
        return ServerError(f"the {self.name} process failed: {error}. Its last words: {tail or '-'}")

    def _receive(self, limit_s: float) -> Any:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise ServerError(f"no reply within {limit_s:.0f} s")
                chunk = os.read(descriptor, 1 << 16)
                if not chunk:
                    raise ServerError("it ended")
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)


def _end(process: subprocess.Popen[bytes], owner: int, grace_s: float) -> None:
    """Close the pipes; in the process that started the other also kill its whole session and reap it."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            try:
                stream.close()
            except BrokenPipeError:
                continue  # closing flushes, and the process may be gone already
    if os.getpid() != owner:
        return  # a fork's copy: the process belongs to the parent
    if grace_s:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
