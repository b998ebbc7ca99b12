r"""The process that runs math-verify for `MathReward`. Standard library and math-verify only; started by path.

It imports and warms the checker once, then forks runners: a fork is ready in milliseconds. Each item runs under a
kernel timer whose signal ends the runner wherever it is, in C code too; the next item gets a fresh fork. The main
process may thus be any thread of any kind of process.

Protocol, JSON lines: out `"ready"`; in `[[gold, answer], …]`, out `["right" | "wrong" | "unparsed" | "timeout" |
"excluded", …]` in the same order. End of input ends the process and its runners.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import selectors
import signal
import sys
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NoReturn

MEMORY_LIMIT = 4 << 30
"""Address space of a runner, bytes: a power tower must not take the machine's memory before its time is up."""
GRACE_S = 0.5
"""How long after its own timer a runner may live before it is killed from outside."""
_WARM_UP = (r"\frac{1}{2}", r"\left( 3, \frac{\pi}{2} \right)", r"x^2 - 2\sqrt{3}x + 1", r"\{1,2\}", "[0, 1)", "x = 3")


class Runner:
    """A forked child that judges one item at a time."""

    def __init__(self, timeout_s: float, inherited: Sequence[int]) -> None:
        request_read, self.request = os.pipe()
        self.reply, reply_write = os.pipe()
        self.item = -1
        self.deadline = 0.0
        self.pid = os.fork()
        if self.pid == 0:
            # A write end kept open here would hide the end of input from the runner it belongs to.
            for descriptor in (*inherited, self.request, self.reply):
                os.close(descriptor)
            _run(request_read, reply_write, timeout_s)
        os.close(request_read)
        os.close(reply_write)

    def send(self, item: int, pair: Sequence[str], limit_s: float) -> None:
        """Start one item; `limit_s` from now the runner is killed."""
        self.item = item
        self.deadline = time.monotonic() + limit_s
        _write(self.request, pair)

    def stop(self) -> None:
        """Kill the child and reap it."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.request)
        os.close(self.reply)


class Pool:
    """Up to `workers` runners; those that die are replaced, the others go on."""

    def __init__(self, timeout_s: float, workers: int) -> None:
        self.timeout_s = timeout_s
        self.workers = workers
        self.runners: list[Runner] = []

    def judge(self, pairs: Sequence[Sequence[str]]) -> list[str]:
        """Status of each pair; at most ceil(pairs / workers) limits long."""
        statuses = ["timeout"] * len(pairs)
        # Plain answers first: they are done before runaway ones compete with them for the processor.
        waiting = sorted(range(len(pairs)), key=lambda item: _weight(pairs[item][1]), reverse=True)
        busy: dict[int, Runner] = {}
        while waiting or busy:
            self._fill(waiting, busy, pairs)
            for runner in self._wait(busy):
                del busy[runner.reply]
                status = _read_line(runner.reply)
                if status:
                    statuses[runner.item] = json.loads(status)
                else:
                    self._drop(runner)
        return statuses

    def close(self) -> None:
        """Kill every runner."""
        while self.runners:
            self.runners.pop().stop()

    def _fill(self, waiting: list[int], busy: dict[int, Runner], pairs: Sequence[Sequence[str]]) -> None:
        while waiting and len(busy) < self.workers:
            runner = next((runner for runner in self.runners if runner.reply not in busy), None) or self._start()
            item = waiting.pop()
            try:
                runner.send(item, pairs[item], self.timeout_s + GRACE_S)
            except BrokenPipeError:
                # It died while idle: the item is not to blame.
                self._drop(runner)
                waiting.append(item)
                continue
            busy[runner.reply] = runner

    def _wait(self, busy: dict[int, Runner]) -> list[Runner]:
        """Runners that replied or died; those past their deadline are killed first."""
        with selectors.DefaultSelector() as selector:
            for descriptor in busy:
                selector.register(descriptor, selectors.EVENT_READ)
            selector.register(0, selectors.EVENT_READ)
            pause = max(0.0, min(runner.deadline for runner in busy.values()) - time.monotonic())
            ready = {key.fd for key, _ in selector.select(pause)}
        if 0 in ready:
            # The main process sends nothing while it waits, so this is the end of its input: it closed, or died.
            self.close()
            sys.exit(0)
        for runner in busy.values():
            if runner.reply not in ready and time.monotonic() >= runner.deadline:
                os.kill(runner.pid, signal.SIGKILL)
        return [busy[descriptor] for descriptor in ready]

    def _start(self) -> Runner:
        inherited = [0, *(fd for runner in self.runners for fd in (runner.request, runner.reply))]
        self.runners.append(Runner(self.timeout_s, inherited))
        return self.runners[-1]

    def _drop(self, runner: Runner) -> None:
        self.runners.remove(runner)
        runner.stop()


def judge(gold: str, answer: str) -> str:
    """Status of one answer; may take any time and memory."""
    from math_verify import verify

    reference = _parse_gold(gold)
    if not reference:
        return "excluded"
    stated = _parse(answer)
    if not stated:
        return "unparsed"
    return "right" if verify(list(reference), stated, timeout_seconds=None) else "wrong"


@lru_cache(maxsize=1024)
def _parse_gold(gold: str) -> tuple[Any, ...]:
    """A reference must be a mathematical object: math-verify's fall-back to the bare text does not count."""
    parsed = _parse(gold)
    return () if all(isinstance(value, str) for value in parsed) else tuple(parsed)


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    marked = text if "$" in text.replace("\\$", "") else f"${text}$"
    return list(parse(marked, parsing_timeout=None)) or list(parse(f"\\boxed{{{text}}}", parsing_timeout=None))


def _run(request: int, reply: int, timeout_s: float) -> NoReturn:
    """A runner's life. Never returns: the parent's stack is not this process's to unwind."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = MEMORY_LIMIT if hard == resource.RLIM_INFINITY else min(MEMORY_LIMIT, hard)
        if sys.platform == "linux":
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        while line := _read_line(request):
            gold, answer = json.loads(line)
            signal.setitimer(signal.ITIMER_REAL, timeout_s)
            status = judge(gold, answer)
            signal.setitimer(signal.ITIMER_REAL, 0)
            _write(reply, status)
    finally:
        os._exit(0)


def _weight(answer: str) -> tuple[bool, int]:
    return ("!" in answer or answer.count("^") > 2), len(answer)


def _write(descriptor: int, value: object) -> None:
    data = json.dumps(value).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


def _read_line(descriptor: int) -> bytes:
    """One line; b"" where the other end closed first."""
    data = b""
    while not data.endswith(b"\n"):
        chunk = os.read(descriptor, 1 << 16)
        if not chunk:
            return b""
        data += chunk
    return data


def main(timeout_s: float, workers: int) -> None:
    """Serve batches from descriptor 0 until it ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints must not reach the protocol
    logging.disable(logging.CRITICAL)
    for text in _WARM_UP:
        judge(text, text)
    _write(output, "ready")
    pool = Pool(timeout_s, workers)
    while line := _read_line(0):
        statuses = pool.judge(json.loads(line))
        try:
            _write(output, statuses)
        except BrokenPipeError:
            break
    pool.close()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
