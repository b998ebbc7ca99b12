"""Competition mathematics: is the boxed answer equivalent to the reference?"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, cast

from dare_lightning.rewards.base import Example, Status, Verdict, check_lengths, report_excluded
from dare_lightning.rewards.math_server import MathServer, MathServerError
from dare_lightning.rewards.text import last_boxed, last_tagged


class MathReward:
    r"""`value` where math-verify finds the answer equivalent to the reference, else 0.

    The answer is the last `\boxed{…}`, inside the last `<answer>…</answer>` where there is one, or else that
    tag's whole content. Checking runs in processes of our own, which are started at the first call, stay warm, and
    end with `close`, with the reward or with the program; any thread and any process, daemonic ones too, may call.
    A check past its limit is killed alone and counts as "timeout". A batch of n takes at most 3 + ceil(n / workers)
    limits, whatever it holds; ordinary checks take a few milliseconds. Needs a POSIX system (it forks).

    Args:
        timeout_s: limit of one check, seconds of wall-clock time. During the first three limits of a batch a check
            that got less than half a limit of processor time may go on until it has: a right answer should not turn
            wrong because the machine is busy.
        workers: checks that run at the same time. More than there are cores is sensible: they only bound how long
            runaway checks can hold up a batch.
        value: reward of a right answer.
    """

    def __init__(self, timeout_s: float = 2.0, workers: int = 8, value: float = 1.0) -> None:
        if timeout_s <= 0 or workers < 1:
            raise ValueError(f"timeout_s={timeout_s}, workers={workers}: both must be positive")
        self.timeout_s = timeout_s
        self.workers = workers
        self.value = value
        self._server: MathServer | None = None
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def __call__(self, completions: Sequence[str], examples: Sequence[Example]) -> list[Verdict]:
        """One verdict for each completion.

        Raises:
            MathServerError: the checking process failed twice in a row.
        """
        check_lengths(completions, examples)
        answers = [extract(completion) for completion in completions]
        golds = [reference(example.ground_truth) for example in examples]
        # An empty answer goes along: it tells whether the reference can be read at all.
        pairs = [(gold, answer or "") for gold, answer in zip(golds, answers, strict=True)]
        statuses = self._judge(list(dict.fromkeys(pairs)))
        verdicts = []
        for pair, answer in zip(pairs, answers, strict=True):
            status = statuses[pair]
            verdicts.append(Verdict(self.value if status == "right" else 0.0, status, answer))
        report_excluded(verdicts, examples, "the reference cannot be parsed")
        return verdicts

    def close(self) -> None:
        """End the checking processes. A later call starts new ones."""
        self._forget_fork()
        with self._lock:
            if self._server is not None:
                self._server.close()
                self._server = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as its settings: the receiving process starts its own checkers."""
        return MathReward, (self.timeout_s, self.workers, self.value)

    def _judge(self, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], Status]:
        if not pairs:
            return {}
        self._forget_fork()
        with self._lock:
            try:
                statuses = self._running().judge(pairs)
            except MathServerError:
                self._server = None
                statuses = self._running().judge(pairs)
        return dict(zip(pairs, cast(list[Status], statuses), strict=True))

    def _running(self) -> MathServer:
        if self._server is None:
            self._server = MathServer(self.timeout_s, self.workers)
        return self._server

    def _forget_fork(self) -> None:
        """In a forked copy the server and the lock are the parent's: start afresh."""
        if self._owner != os.getpid():
            self._owner = os.getpid()
            self._lock = threading.Lock()
            self._server = None


def extract(text: str) -> str | None:
    """The stated answer; None where there is none."""
    tagged = last_tagged(text)
    scope = text if tagged is None else tagged
    return last_boxed(scope) or tagged or None


def reference(ground_truth: str) -> str:
    r"""The reference answer: a worked solution's last `\boxed{…}`, or the text itself."""
    return last_boxed(ground_truth or "") or (ground_truth or "").strip()
