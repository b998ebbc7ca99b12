"""The process that judges are forked from. It never holds a test, so neither does the memory of a program."""

from __future__ import annotations

import array
import gc
import importlib
import json
import os
import select
import signal
import socket
from typing import Any, NoReturn

from dare_lightning.rewards.sandbox import filters, jail, judge, kernel, watch
from dare_lightning.rewards.sandbox.removal import remove

# fmt: off
WARM = [
    "_strptime", "abc", "array", "ast", "base64", "bisect", "calendar", "cmath", "collections",
    "concurrent.futures", "copy", "csv", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools",
    "hashlib", "heapq", "io", "itertools", "json", "math", "numbers", "operator", "pprint", "queue", "random", "re",
    "statistics", "string", "struct", "textwrap", "threading", "time", "traceback", "types", "typing",
    "unicodedata", "zlib",
]
# fmt: on
"""Loaded once, so that programs which import them start at once."""
MESSAGE = 1 << 16


class BrokenError(Exception):
    """The sandbox itself failed."""


class Zygote:
    """Serves `{"run": name, "slot", "tasks"}` with two descriptors, and `{"kill": name}`, from a packet socket.

    Answers `{"started": name, "pid"}` and `{"ended": name, "status"}`, the latter when nothing of it is left.
    """

    def __init__(self, control: socket.socket, cell: jail.Cell, code_root: str) -> None:
        self.control = control
        self.cell = cell
        self.code_root = code_root
        self.jobs: dict[int, tuple[str, int]] = {}
        self.paths: list[str] = []
        self.rules: tuple[filters.FileRules, filters.FileRules] | None = None
        self.wake_read, self.wake_write = os.pipe()

    def start(self) -> None:
        """Set up what all programs share.

        Raises:
            OSError: the system refuses a layer.
        """
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        self.paths = jail.readable(self.cell.packages)
        if self.cell.level == "namespaces":
            kernel.unshare(kernel.NEW_USERS | kernel.NEW_MOUNTS | kernel.NEW_NETWORK | kernel.NEW_HOSTNAME)
            self._say({"unshared": True})
            self.control.recv(MESSAGE)
            jail.build_root(self.cell)
        elif self.cell.level == "filters":
            self.rules = jail.shared_rules(self.cell, self.paths)
        if self.cell.filtered:
            own = self.cell.own_pids
            for rules in ((own, True, own), (True, False, own), (True, False, True)):
                filters.filter_program(*rules)
        for name in WARM:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()
        os.set_blocking(self.wake_write, False)
        os.set_blocking(self.wake_read, False)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def serve(self) -> None:
        """Work until the worker is gone; then end everything."""
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        poll.register(self.wake_read, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self.wake_read in ready:
                os.read(self.wake_read, 4096)
                self._reap()
            if self.control.fileno() in ready and not self._answer():
                break
        for pid in self.jobs:
            os.kill(pid, signal.SIGKILL)
        self._reap(os.WEXITED)

    def _answer(self) -> bool:
        """One request; False at the end of input."""
        data, descriptors, _, _ = socket.recv_fds(self.control, MESSAGE, 2)
        if not data:
            return False
        request = json.loads(data)
        if "kill" in request:
            for pid, (name, _) in self.jobs.items():
                if name == request["kill"]:
                    os.kill(pid, signal.SIGKILL)
            return True
        name, slot = request["run"], request["slot"]
        pid = os.fork()
        if pid == 0:
            self.control.close()
            tasks = request["tasks"]
            place = jail.Place(self.cell, slot, name, tasks, self.paths, self.code_root, self.rules)
            judge.start(place, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self.jobs[pid] = (name, slot)
        self._say({"started": name, "pid": pid})
        return True

    def _reap(self, flags: int = os.WEXITED | os.WNOHANG) -> None:
        """Collect what has ended; without `WNOHANG` wait until the last job has."""
        while self.jobs or flags & os.WNOHANG:
            try:
                result = os.waitid(os.P_ALL, 0, flags)
            except ChildProcessError:
                return
            if result is None:
                return
            job = self.jobs.pop(result.si_pid, None)
            if job is not None:
                name, slot = job
                self._clear(slot, clean=result.si_code == os.CLD_EXITED and result.si_status == 0)
                self._remove(name)
                self._say({"ended": name, "status": result.si_status})

    def _clear(self, slot: int, clean: bool) -> None:
        """End whatever a judge left behind: its processes are ours by now."""
        if clean:
            return
        user = self.cell.program_id(slot)
        if user is not None and not self.cell.own_pids:
            pid = os.fork()
            if pid == 0:
                _kill_all_of(user)
            os.waitpid(pid, 0)
        stopped: set[int] = set()
        while True:
            found = set(watch.descendants(os.getpid(), watch.processes(), without=self.jobs))
            # A stopped process cannot fork, so this ends: each round finds what the running ones forked meanwhile.
            new = found - stopped
            if not new:
                break
            for pid in new:
                _signal(pid, signal.SIGSTOP)
            stopped |= new
        for pid in stopped:
            _signal(pid, signal.SIGKILL)
        for pid in stopped:
            self._collect(pid)

    def _collect(self, pid: int) -> None:
        try:
            os.waitpid(pid, 0)
        except ChildProcessError:
            return  # its parent, itself dead by now, was nearer

    def _remove(self, name: str) -> None:
        if not self.cell.own_pids:
            remove(f"{self.cell.folder}/{name}")

    def _say(self, message: dict[str, Any]) -> None:
        self.control.send(json.dumps(message).encode())


def _kill_all_of(user: int) -> NoReturn:
    """Every process of a spare user id, at once: none of them can fork between."""
    try:
        os.setresuid(user, user, user)
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        os._exit(0)
    finally:
        os._exit(0)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def run(control: socket.socket, cell: jail.Cell, code_root: str) -> NoReturn:
    """Become a zygote. Says `{"ready": true}`, or `{"failed": why}` and ends."""
    status = 1
    try:
        for descriptor in (0, 1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
        zygote = Zygote(control, cell, code_root)
        try:
            zygote.start()
        except OSError as error:
            zygote._say({"failed": f"{error}"})
            os._exit(1)
        zygote._say({"ready": True})
        zygote.serve()
        status = 0
    finally:
        os._exit(status)


class Handle:
    """The worker's end of a zygote."""

    def __init__(self, cell: jail.Cell, code_root: str, maps: tuple[str, str] | None) -> None:
        self.cell = cell
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            self.control.close()
            run(theirs, cell, code_root)
        theirs.close()
        answer = self.receive()
        if "unshared" in answer:
            try:
                self._map(maps)
                self.control.send(b"{}")
                answer = self.receive()
            except OSError as error:
                answer = {"failed": str(error)}
        self.failure: str | None = answer.get("failed")

    def run(self, name: str, slot: int, tasks: int, job: int, reply: int) -> None:
        """Start a judge; `job` is a file that describes the program and its tests, `reply` takes its messages."""
        request = json.dumps({"run": name, "slot": slot, "tasks": tasks}).encode()
        descriptors = array.array("i", [job, reply])
        self.control.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])

    def kill(self, name: str) -> None:
        """End a judge and its program. `{"ended"}` follows."""
        self.control.send(json.dumps({"kill": name}).encode())

    def receive(self) -> dict[str, Any]:
        """The next message, `{"failed"}` where the zygote is gone."""
        data = self.control.recv(MESSAGE)
        return json.loads(data) if data else {"failed": "the zygote ended"}

    def close(self) -> None:
        """End it, its judges and their programs, and wait for it."""
        self.control.close()
        os.waitpid(self.pid, 0)

    def _map(self, maps: tuple[str, str] | None) -> None:
        """Say who the users of its namespace are: one's own, or those given."""
        users, groups = maps or (f"0 {os.getuid()} 1", f"0 {os.getgid()} 1")
        if maps is None:
            self._write("setgroups", "deny")
        self._write("uid_map", users)
        self._write("gid_map", groups)

    def _write(self, name: str, text: str) -> None:
        with open(f"/proc/{self.pid}/{name}", "w") as file:
            file.write(text)
