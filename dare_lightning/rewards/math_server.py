"""The main process's end of `math_worker`."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dare_lightning.rewards.server import Server, ServerError

START_LIMIT_S = 120.0
SLACK_S = 10.0
"""Beyond the sum of its items' limits a batch gets this long before the whole worker counts as hung."""


class MathServerError(RuntimeError):
    """The worker could not start, died or hung."""


class MathServer:
    """One worker process and what it is asked."""

    def __init__(self, timeout_s: float, workers: int) -> None:
        self.timeout_s = timeout_s
        self.workers = workers
        # By path and without the script's folder on sys.path: a module named `math` lies beside it.
        script = str(Path(__file__).with_name("math_worker.py"))
        command = [sys.executable, "-P", script, str(timeout_s), str(workers)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._server = Server(command, environment, "math checking")
        self._ready = False

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._server.pid

    def judge(self, pairs: Sequence[tuple[str, str]]) -> list[str]:
        """Status of each (gold, answer).

        Raises:
            MathServerError: the worker is gone or hung; it is closed.
        """
        rounds = math.ceil(len(pairs) / self.workers) + 4
        try:
            if not self._ready:
                self._server.receive(START_LIMIT_S)
                self._ready = True
            statuses = self._server.ask(pairs, rounds * self.timeout_s + SLACK_S)
        except ServerError as error:
            raise MathServerError(str(error)) from error
        return [str(status) for status in statuses]

    def close(self) -> None:
        """End the worker and its runners, and wait until they are gone. Safe to call twice."""
        self._server.close()
