r"""The process that runs math-verify for `MathReward`. Standard library and math-verify only; started by path.

It imports and warms the checker once, then forks runners: a fork is ready in milliseconds. A runner past its limit is
killed wherever it is, in C code too, and the next item gets a fresh fork; a kernel timer ends runners that nobody is
left to kill. The main process may thus be any thread of any kind of process.

Protocol, JSON lines: out `"ready"`; in `[[gold, answer], …]`, out `["right" | "wrong" | "unparsed" | "timeout" |
"excluded", …]` in the same order. End of input ends the process and its runners.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import re
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
FRESH_S = 0.25
"""A check that runs longer is no ordinary one: others start beside it."""
PAUSE_S = 0.05
"""How often limits are looked at while checks run."""
STARVED = 3
"""For how many limits a batch lets checks go on that got less than half a limit of processor time: a right answer
should not time out because the machine is busy, and a batch full of runaway ones should still end."""
_PYTHON_POWER = re.compile(r"\*\*\s*(?:(?P<word>-?\w+)|\((?P<group>[^()]*)\))?")
_WARM_UP = (
    (r"\frac{1}{2}", "0.5"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/3)"),
    (r"(-\infty,-8)\cup (-8,2]", r"(-\infty, 2]"),
    (r"11z^{17}(5+11z^{17})", r"55z^{17}+121z^{34}"),
    (r"\frac{5(\sqrt{3}-1)}{4}", r"\sqrt[3]{2}"),
    (r"\left[ \frac{\pi}{4}, \frac{3 \pi}{4} \right]", r"[\pi/4, 3\pi/4)"),
)


class Runner:
    """A forked child that judges one item at a time."""

    def __init__(self, timeout_s: float, inherited: Sequence[int]) -> None:
        request_read, self.request = os.pipe()
        self.reply, reply_write = os.pipe()
        self.item = -1
        self.started = 0.0
        self.used_before = 0.0
        self.pid = os.fork()
        if self.pid == 0:
            # A write end kept open here would hide the end of input from the runner it belongs to.
            for descriptor in (*inherited, self.request, self.reply):
                os.close(descriptor)
            _run(request_read, reply_write, timeout_s)
        os.close(request_read)
        os.close(reply_write)

    def send(self, item: int, pair: Sequence[str]) -> None:
        """Start one item."""
        self.item = item
        self.started = time.monotonic()
        self.used_before = self.processor_time()
        _write(self.request, pair)

    def processor_time(self) -> float:
        """Seconds of processor time since the start of the process; infinite where the system does not tell."""
        if sys.platform != "linux":
            return float("inf")
        with open(f"/proc/{self.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

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
        self.cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        self.patient_until = 0.0
        self.runners: list[Runner] = []

    def judge(self, pairs: Sequence[Sequence[str]]) -> list[str]:
        """Status of each pair, in order."""
        statuses = ["timeout"] * len(pairs)
        # Plain-looking answers first, so that they are done before runaway ones need the processor.
        waiting = sorted(range(len(pairs)), key=lambda item: _weight(pairs[item][1]), reverse=True)
        busy: dict[int, Runner] = {}
        self.patient_until = time.monotonic() + STARVED * self.timeout_s
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
        """Start checks: up to `workers` at a time, of which no more than there are cores have just started."""
        while waiting and len(busy) < self.workers and self._fresh(busy) < self.cores:
            runner = next((runner for runner in self.runners if runner.reply not in busy), None) or self._start()
            item = waiting.pop()
            try:
                runner.send(item, pairs[item])
            except BrokenPipeError:
                # It died while idle: the item is not to blame.
                self._drop(runner)
                waiting.append(item)
                continue
            busy[runner.reply] = runner

    def _wait(self, busy: dict[int, Runner]) -> list[Runner]:
        """Runners that replied or died; those past their limit are killed."""
        with selectors.DefaultSelector() as selector:
            for descriptor in busy:
                selector.register(descriptor, selectors.EVENT_READ)
            selector.register(0, selectors.EVENT_READ)
            ready = {key.fd for key, _ in selector.select(PAUSE_S)}
        if 0 in ready:
            # The main process sends nothing while it waits, so this is the end of its input: it closed, or died.
            self.close()
            sys.exit(0)
        for runner in busy.values():
            if runner.reply not in ready and self._is_over(runner):
                os.kill(runner.pid, signal.SIGKILL)
        return [busy[descriptor] for descriptor in ready]

    def _is_over(self, runner: Runner) -> bool:
        now = time.monotonic()
        if now - runner.started < self.timeout_s:
            return False
        return now >= self.patient_until or runner.processor_time() - runner.used_before >= self.timeout_s / 2

    def _fresh(self, busy: dict[int, Runner]) -> int:
        return sum(time.monotonic() - runner.started < FRESH_S for runner in busy.values())

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

    text = _PYTHON_POWER.sub(_latex_power, text)
    marked = text if "$" in text.replace("\\$", "") else f"${text}$"
    return list(parse(marked, parsing_timeout=None)) or list(parse(f"\\boxed{{{text}}}", parsing_timeout=None))


def _latex_power(match: re.Match[str]) -> str:
    """`a**2` as LaTeX: math-verify reads it as `a` alone."""
    exponent = match["word"] or match["group"]
    return "^" if exponent is None else f"^{{{exponent}}}"


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
            signal.setitimer(signal.ITIMER_REAL, (STARVED + 1) * timeout_s)
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
    for gold, answer in _WARM_UP:
        judge(gold, gold)
        judge(gold, answer)
    gc.freeze()  # the runners share this memory as long as nobody touches it
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
