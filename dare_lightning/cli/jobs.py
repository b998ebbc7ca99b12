"""Jobs of a sweep: each its own process and folder, none stopped by another's failure."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from dare_lightning.cli.console import say
from dare_lightning.cli.help import program
from dare_lightning.cli.quoting import unquote_path

SWEEP_FILE = "sweep.json"
STATUS_FILE = "status.json"
_GRACE_SECONDS = 30.0


@dataclass(frozen=True)
class Job:
    """One run of a sweep.

    Attributes:
        number: position in the sweep.
        words: its overrides, as a command line takes them.
        folder: its run folder.
    """

    number: int
    words: tuple[str, ...]
    folder: Path

    @property
    def label(self) -> str:
        """Overrides for people: without the run folder, quoted for a shell."""
        return shlex.join(map(unquote_path, self.words)) or "(defaults)"

    def status(self) -> dict[str, Any]:
        """What the job's process wrote last; "not started" where it wrote nothing."""
        file = self.folder / STATUS_FILE
        if not file.is_file():
            return {"status": "not started", "error": ""}
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return content


@dataclass(frozen=True)
class Sweep:
    """A sweep's folder and what is needed to run its jobs again.

    Attributes:
        folder: holds one folder a job, and `sweep.json`.
        module: what `python -m` runs.
        command: the command of every job.
        flags: options passed on to every job.
        cwd: where relative paths of the overrides start.
        jobs: all jobs.
    """

    folder: Path
    module: str
    command: str
    flags: tuple[str, ...]
    cwd: Path
    jobs: tuple[Job, ...]

    def save(self) -> None:
        """Write `sweep.json`."""
        content = {
            "module": self.module,
            "command": self.command,
            "flags": self.flags,
            "cwd": str(self.cwd),
            "jobs": [{"number": job.number, "overrides": job.words} for job in self.jobs],
        }
        (self.folder / SWEEP_FILE).write_text(json.dumps(content, indent=2), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Sweep:
        """Read `sweep.json` of an earlier sweep."""
        content = json.loads((folder / SWEEP_FILE).read_text(encoding="utf-8"))
        jobs = [Job(job["number"], tuple(job["overrides"]), folder / str(job["number"])) for job in content["jobs"]]
        flags, cwd = tuple(content["flags"]), Path(content["cwd"])
        return cls(folder, content["module"], content["command"], flags, cwd, tuple(jobs))

    def argv(self, job: Job) -> list[str]:
        """The command line of a job's process."""
        run_dir = f"run_dir={job.folder.resolve()}"
        return [sys.executable, "-m", self.module, self.command, *self.flags, *job.words, run_dir]


def main_module() -> str:
    """The module this process was started from, so that jobs run the same program."""
    spec = sys.modules["__main__"].__spec__
    return "dare_lightning" if spec is None else spec.name.removesuffix(".__main__")


class Runner:
    """Runs jobs, at most `parallel` at the same time.

    With one at a time the jobs write to this terminal; otherwise to `output.log` in their folders.

    Args:
        sweep: whose jobs these are.
        parallel: processes at the same time.
        stop_on_failure: start nothing more after a failure; what runs may finish.
    """

    def __init__(self, sweep: Sweep, parallel: int = 1, stop_on_failure: bool = False) -> None:
        self.sweep = sweep
        self.parallel = parallel
        self.stop_on_failure = stop_on_failure
        self.failed = False
        self.interrupted = False
        self._running: dict[Job, tuple[subprocess.Popen[bytes], IO[bytes] | None]] = {}

    def run(self, jobs: Sequence[Job]) -> None:
        """Run the jobs to their ends; Ctrl-C or SIGTERM ends those that run and starts no more."""
        waiting = list(jobs)
        # Launcher plugins may call from a thread, where handlers cannot be set.
        in_main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGTERM, _raise_interrupt) if in_main else None
        try:
            while waiting or self._running:
                while waiting and len(self._running) < self.parallel and not (self.failed and self.stop_on_failure):
                    self._start(waiting.pop(0))
                if not self._running:
                    break
                time.sleep(0.02)
                self._collect()
        except KeyboardInterrupt:
            self.interrupted = True
            self._end_running()
        finally:
            if in_main:
                signal.signal(signal.SIGTERM, before)

    def _start(self, job: Job) -> None:
        job.folder.mkdir(parents=True, exist_ok=True)
        say(f"job {job.number} in {job.folder}: {job.label}")
        output = None if self.parallel == 1 else (job.folder / "output.log").open("wb")
        # A run folder of this process is not the job's.
        environment = {name: value for name, value in os.environ.items() if name != "DARE_RUN_DIR"}
        process = subprocess.Popen(
            self.sweep.argv(job), cwd=self.sweep.cwd, env=environment, stdout=output, stderr=output
        )
        self._running[job] = (process, output)

    def _collect(self) -> None:
        for job, (process, output) in list(self._running.items()):
            if process.poll() is None:
                continue
            del self._running[job]
            if output is not None:
                output.close()
            status = settle(job, process.returncode)
            if status["status"] != "finished":
                self.failed = True
            if self.parallel > 1:
                say(f"job {job.number} {status['status']}" + (f": {status['error']}" if status["error"] else ""))

    def _end_running(self) -> None:
        """Children of a terminal got Ctrl-C as well; those that go on after a while are told to end."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while self._running and time.monotonic() < deadline:
            time.sleep(0.05)
            self._collect()
        for process, _ in self._running.values():
            process.terminate()
        for process, _ in self._running.values():
            process.wait()
        self._collect()


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def settle(job: Job, exit_code: int) -> dict[str, Any]:
    """The job's final status; what its process could not write itself (killed, crashed) is written for it."""
    status = job.status()
    if status["status"] in ("running", "not started") or (exit_code != 0 and status["status"] == "finished"):
        ended = f"killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit status {exit_code}"
        # The last line of what it wrote says more than the number, where it was caught.
        output = job.folder / "output.log"
        lines = output.read_text(encoding="utf-8", errors="replace").split("\n") if output.is_file() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        status |= {"status": "failed" if exit_code else "finished", "exit_code": exit_code}
        status["error"] = (last.removeprefix("error: ") or ended) if exit_code > 0 else ended if exit_code else ""
        (job.folder / STATUS_FILE).write_text(json.dumps(status, indent=2), encoding="utf-8")
    return status


def report(sweep: Sweep, interrupted: bool = False) -> int:
    """Say how the sweep ended, failed jobs last; returns its exit status."""
    ends = [(job, job.status()) for job in sweep.jobs]
    counts = {name: sum(s["status"] == name for _, s in ends) for name in ("finished", "failed", "interrupted")}
    counts["not started"] = len(ends) - sum(counts.values())
    listing = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    say(f"\n{len(ends)} jobs: {listing}; results in {sweep.folder}")
    bad = [(job, status) for job, status in ends if status["status"] != "finished"]
    if not bad:
        return 0
    say("did not finish:")
    for job, status in bad:
        error = status["error"].splitlines()[0] if status["error"] else status["status"]
        log = job.folder / "job.log"
        say(f"  {job.number}  {job.label}\n     {error}" + (f"\n     log: {log}" if log.is_file() else ""))
    say(f"run only these again:\n  {program()} {sweep.command} --rerun-failed {shlex.quote(str(sweep.folder))}")
    return 130 if interrupted else 1
