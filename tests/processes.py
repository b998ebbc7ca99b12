"""Programs of this project as real processes, without the ten seconds in which each would import the same modules.

A process comes from a fork of one interpreter with everything imported (`tests/fork_server.py`); signals, kills, exit
statuses, output and folders are those of any process. What is shared is what imports leave behind: the hash seed,
`PYTHONPATH`, and library settings such as `OMP_NUM_THREADS`. Where the start itself is tested, start `sys.executable`;
`DARE_FRESH_PROCESSES=1` makes every process here a new interpreter.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import IO

from tests.fork_server import ANSWER
from tests.shared import ROOT

Finished = subprocess.CompletedProcess[str]


def environment(**changes: str) -> dict[str, str]:
    """The environment of a process that runs the checkout from any folder, on one thread."""
    own = {name: value for name, value in os.environ.items() if name != "DARE_RUN_DIR"}
    return {**own, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **changes}


class Process:
    """A running `python -m <module> <words>`, with its own session; it ends with this object at the latest.

    Args:
        module, words: what to run.
        cwd: where.
        env: its whole environment; `environment()` where None.
        output: of the process; nowhere where None.
        errors: where its errors go; to `output` where None.
    """

    def __init__(
        self,
        module: str,
        *words: str,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        output: IO[str] | None = None,
        errors: IO[str] | None = None,
    ) -> None:
        self.returncode: int | None = None
        self._channel, theirs = socket.socketpair()
        command = {"module": module, "words": words, "cwd": str(cwd), "environment": env or environment()}
        with open(os.devnull, "r+") as nowhere, theirs:
            to = nowhere if output is None else output
            streams = [stream.fileno() for stream in (nowhere, to, to if errors is None else errors)]
            socket.send_fds(_server()[0], [b"\n"], [*streams, theirs.fileno()])
        self._channel.sendall(json.dumps(command).encode() + b"\n")
        self.pid = self._answer()

    def poll(self) -> int | None:
        """The exit status, minus the signal's number where a signal ended it; None while it runs."""
        if self.returncode is None and select.select([self._channel], [], [], 0)[0]:
            self.returncode = self._answer()
        return self.returncode

    def wait(self, timeout: float = 240.0) -> int:
        """The exit status, once there is one.

        Raises:
            subprocess.TimeoutExpired: there is none after `timeout` seconds.
        """
        if self.returncode is None:
            if not select.select([self._channel], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            self.returncode = self._answer()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process at once."""
        self.send_signal(signal.SIGKILL)

    def _answer(self) -> int:
        answer = self._channel.recv(ANSWER.size, socket.MSG_WAITALL)
        if not answer:
            raise RuntimeError("the fork server has died; DARE_FRESH_PROCESSES=1 starts processes without its imports")
        (number,) = ANSWER.unpack(answer)
        return int(number)


def run(module: str, *words: str, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 240.0) -> Finished:
    """Run `python -m <module> <words>` to its end, and keep what it writes.

    Raises:
        subprocess.TimeoutExpired: it runs on after `timeout` seconds; it is killed.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = Process(module, *words, cwd=cwd, env=env, output=output, errors=errors)
        try:
            status = process.wait(timeout)
        finally:
            process.kill()
        output.seek(0)
        errors.seek(0)
        return Finished([module, *words], status, output.read(), errors.read())


@cache
def _server() -> tuple[socket.socket, subprocess.Popen[bytes] | None]:
    """What the server is asked through, and its process where it was started here; it ends when nobody can ask.

    The workers of a test run share one where the system has addresses without a file, by which they find it.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    with tempfile.TemporaryDirectory() as folder:
        address = f"\0dare-{run}" if run and sys.platform == "linux" else f"{folder}/socket"
        while True:
            ours = socket.socket(socket.AF_UNIX)
            try:
                ours.connect(address)
                return ours, None
            except (ConnectionRefusedError, FileNotFoundError):
                pass
            with socket.socket(socket.AF_UNIX) as listener:
                try:
                    listener.bind(address)
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:  # another worker is about to listen
                        raise
                    continue
                listener.listen()
                ours.connect(address)
                return ours, _started(listener)


def _started(listener: socket.socket) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.fork_server", str(listener.fileno())]
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        pass_fds=[listener.fileno()],
        start_new_session=True,
        stdin=nowhere,
        stdout=nowhere,
    )
