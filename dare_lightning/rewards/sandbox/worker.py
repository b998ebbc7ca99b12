"""The process that holds a batch: it hands out programs to judges, watches what they use, and collects the verdicts.

Protocol, JSON lines: out `{"protection": …}` or `{"error": …}`; in `{"tests": […], "jobs": [[sources, number of the
tests], …]}`, out a list with "right", "wrong", "unparsed", "timeout" or "excluded" for each job, or `{"error": …}`. End
of input ends everything.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dare_lightning.rewards.sandbox import jail, probe, watch
from dare_lightning.rewards.sandbox.removal import remove_quietly
from dare_lightning.rewards.sandbox.zygote import BrokenError, Handle

FRESH_S = 0.25
"""A program that runs longer is no ordinary one: others start beside it, and what it uses is looked at."""
PAUSE_S = 0.05
LOOK_S = 0.25
STARVED = 3
"""For how many limits a batch gives programs back the time in which they waited for a processor."""
START_S = 30.0
"""A judge that is not ready by then never will be."""
TRIES = 3
MEMORY_SLACK = 64 << 20
SLACK_PROCESSES = probe.SLACK_PROCESSES
ENTRIES = 4 * jail.MAX_FILES


@dataclass
class Run:
    """A program that is being judged."""

    item: int
    name: str
    slot: int
    reply: socket.socket
    started: float
    tries: int = 1
    judge: int = 0
    program: int = 0
    prepared: bool = False
    problem: str = "the judge did not start"
    status: str | None = None
    value: Any = None
    buffer: bytes = b""
    looked: float = field(default_factory=time.monotonic)


class Worker:
    """Judges batches with one zygote."""

    def __init__(self, handle: Handle, workers: int) -> None:
        self.handle = handle
        self.cell = handle.cell
        self.slots = list(range(workers))
        # Two for each core: while one is torn down the next is set up.
        self.fresh = 2 * len(os.sched_getaffinity(0))
        self.runs: dict[str, Run] = {}
        self.counter = 0
        self.patient_until = 0.0
        self.tasks = 0

    def judge(self, jobs: Sequence[tuple[Sequence[str], int]], tests: Sequence[Any]) -> list[tuple[str, Any]]:
        """Status of each job (sources, number of its tests), and the value where it asks for one.

        Raises:
            BrokenError: judges do not start, or the zygote is gone.
        """
        results: list[tuple[str, Any]] = [("wrong", None)] * len(jobs)
        # Written out once: a group of completions shares its tests, and they can be large.
        texts = [json.dumps(test) for test in tests]
        waiting = [(item, 1) for item in reversed(range(len(jobs)))]
        self.patient_until = time.monotonic() + STARVED * self.cell.limits.timeout_s
        self.tasks = self._tasks()
        while waiting or self.runs:
            while waiting and self.slots and self._fresh() < self.fresh:
                item, tries = waiting.pop()
                sources, number = jobs[item]
                self._start(item, f'{{"sources": {json.dumps(sources)}, "tests": {texts[number]}}}', tries)
            for run in self._wait():
                if run.status is not None:
                    results[run.item] = (run.status, run.value)
                elif not run.program:
                    if run.tries == TRIES:
                        raise BrokenError(f"a program could not be shut in: {run.problem}")
                    waiting.append((run.item, run.tries + 1))
                else:
                    results[run.item] = ("wrong" if run.prepared else "excluded", None)
        return results

    def _tasks(self) -> int:
        """How many tasks the kernel counts against a program's limit that are not its own."""
        release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
        if self.cell.own_pids and release >= (5, 14):
            return 1
        if self.cell.ids is not None and not self.cell.own_pids:
            return 0
        # Counted a user, on the whole machine: other programs and our own processes are among them.
        return watch.tasks_of(os.getuid()) + 2 * (len(self.slots) + len(self.runs))

    def _start(self, item: int, job: str, tries: int) -> None:
        ours, theirs = socket.socketpair()
        descriptor = os.memfd_create("job")
        try:
            with open(descriptor, "w", encoding="utf-8", closefd=False) as file:
                file.write(job)
            os.lseek(descriptor, 0, os.SEEK_SET)
            self.counter += 1
            name, slot = f"run{self.counter}", self.slots.pop()
            self.handle.run(name, slot, self.tasks, descriptor, theirs.fileno())
        finally:
            os.close(descriptor)
            theirs.close()
        self.runs[name] = Run(item, name, slot, ours, time.monotonic(), tries)

    def _wait(self) -> list[Run]:
        """Runs that are over, when something happened or after a pause."""
        with selectors.DefaultSelector() as selector:
            selector.register(0, selectors.EVENT_READ)
            selector.register(self.handle.control, selectors.EVENT_READ)
            for run in self.runs.values():
                if run.reply.fileno() >= 0:
                    selector.register(run.reply, selectors.EVENT_READ, run)
            ready = selector.select(PAUSE_S)
        over = []
        for key, _ in ready:
            if key.fd == 0:
                raise EOFError  # the main process sends nothing while it waits: it closed, or died
            if key.data is not None:
                self._read(key.data)
        if any(key.fd == self.handle.control.fileno() for key, _ in ready):
            message = self.handle.receive()
            if "failed" in message:
                raise BrokenError(message["failed"])
            run = self.runs[message.get("started") or message["ended"]]
            if "started" in message:
                run.judge = message["pid"]
            else:
                over.append(self._end(run))
        for run in self.runs.values():
            self._look(run)
        return over

    def _read(self, run: Run) -> None:
        data = run.reply.recv(1 << 20)
        if not data:
            run.reply.close()
            return
        run.buffer += data
        while b"\n" in run.buffer:
            line, _, run.buffer = run.buffer.partition(b"\n")
            message = json.loads(line)
            if "pid" in message:
                run.program = message["pid"]
                run.started = time.monotonic()
            run.problem = message.get("problem", run.problem)
            run.prepared |= "setup" in message
            if "status" in message and run.status is None:
                run.status, run.value = message["status"], message.get("value")

    def _end(self, run: Run) -> Run:
        while run.reply.fileno() >= 0:
            self._read(run)
        self.slots.append(run.slot)
        return self.runs.pop(run.name)

    def _look(self, run: Run) -> None:
        """Stop a run that is past a limit."""
        now = time.monotonic()
        if run.status is not None or now - run.started < FRESH_S or not run.judge:
            return
        if not run.program:
            if now - run.started > START_S:
                self._stop(run, "wrong")
        elif now - run.looked >= LOOK_S:
            run.looked = now
            seen = watch.processes()
            below = watch.descendants(run.judge, seen)
            if self._is_too_big(run, seen, below):
                self._stop(run, "wrong")
            elif now - run.started >= self._allowed(now, below):
                self._stop(run, "timeout")

    def _allowed(self, now: float, below: Sequence[int]) -> float:
        limit = self.cell.limits.timeout_s
        return limit + (min(watch.waited(below), STARVED * limit) if now < self.patient_until else 0.0)

    def _is_too_big(self, run: Run, seen: Mapping[int, watch.Task], below: Sequence[int]) -> bool:
        limits = self.cell.limits
        used = sum(seen[number].memory for number in below)
        count = sum(seen[number].threads for number in below)
        if used > limits.memory + MEMORY_SLACK or count > limits.processes + SLACK_PROCESSES:
            return True
        if self.cell.own_pids:
            return False  # its folder has a size of its own
        size, entries = watch.folder_size(f"{self.cell.folder}/{run.name}", max(limits.disk, ENTRIES))
        return size > limits.disk or entries > ENTRIES

    def _stop(self, run: Run, status: str) -> None:
        run.status = status
        self.handle.kill(run.name)

    def _fresh(self) -> int:
        return sum(time.monotonic() - run.started < FRESH_S for run in self.runs.values())


def _line() -> bytes:
    """One line of standard input; b"" at its end."""
    data = b""
    while not data.endswith(b"\n"):
        part = os.read(0, 1 << 20)
        if not part:
            return b""
        data += part
    return data


def _say(output: int, message: object) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(output, data) :]


def main() -> None:
    """Serve batches from standard input until it ends. Settings are JSON, on the command line."""
    settings = json.loads(sys.argv[1])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.dup(1)
    os.dup2(2, 1)
    folder = settings["folder"]
    # Programs have users of their own, who must be able to reach their folders in it.
    os.chmod(folder, 0o711)
    try:
        limits = jail.Limits(**settings["limits"])
        handle, protection = probe.choose(settings, limits, folder, Worker)
        if handle is None:
            _say(output, {"error": protection})
            return
        _say(output, {"protection": protection})
        worker = Worker(handle, settings["workers"])
        while line := _line():
            try:
                _say(output, [status for status, _ in worker.judge(**json.loads(line))])
            except BrokenError as error:
                _say(output, {"error": str(error)})
                break
        handle.close()
    except (EOFError, BrokenPipeError):
        return
    finally:
        remove_quietly(folder)
