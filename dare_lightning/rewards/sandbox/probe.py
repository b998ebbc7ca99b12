"""Finds out, by trying, how well programs can be shut in on this system."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from dare_lightning.rewards.sandbox import filters, jail
from dare_lightning.rewards.sandbox.zygote import BrokenError, Handle

SPARE_IDS = 4096
SLACK_PROCESSES = 8
"""Where the kernel counts a user's processes and not a program's, the bound is not exact."""
PROGRAM = '''
def trial(port, pid, secret, victim, memory):
    """What this program can do to the outside; "" for a thing it cannot."""
    import importlib, os, socket
    for name in ("decimal", "sqlite3.dump", "json.tool", "xml.sax", "encodings.cp1252", "zoneinfo"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            pass  # left out when this Python was built
    def able(action):
        try:
            action()
        except (OSError, MemoryError):
            return False
        return True
    return {
        "network": able(lambda: socket.create_connection(("127.0.0.1", port), 1)),
        "files": able(lambda: open(secret).read()) or able(lambda: os.unlink(victim)),
        "signals": able(lambda: os.kill(pid, 0)),
        "memory": able(lambda: bytearray(memory)),
        "user": os.getuid(),
        "writes": able(lambda: open("own.txt", "w").write("x")),
    }
def count(processes):
    import os, time
    started = 0
    for _ in range(processes + 16):
        try:
            child = os.fork()
        except OSError:
            break
        if child == 0:
            time.sleep(60)
            os._exit(0)
        started += 1
    return started
'''


class Judges(Protocol):
    """What a worker does, as far as a trial needs it."""

    def judge(self, jobs: list[tuple[list[str], int]], tests: list[Any]) -> list[tuple[str, Any]]:
        """Status and value of each job."""
        ...


def choose(
    settings: Mapping[str, Any], limits: jail.Limits, folder: str, worker: Callable[[Handle, int], Judges]
) -> tuple[Handle | None, Any]:
    """The strongest way that holds, with what it was found to hold; or None with the reasons why none does.

    Args:
        settings: "protection" ("auto" or a level), "packages", "code_root".
    """
    wanted = settings["protection"]
    refused: dict[str, str] = {}
    for cell, maps in _ways(limits, folder, settings["packages"], wanted, settings["workers"]):
        handle = Handle(cell, settings["code_root"], maps)
        if handle.failure is not None:
            refused[cell.level] = handle.failure
        else:
            try:
                holds, problem = _trial(cell, worker(handle, 1))
            except BrokenError as error:
                holds, problem = {}, str(error)
            if not problem:
                return handle, {"level": cell.level, "holds": holds, "user": cell.ids is not None, "refused": refused}
            refused[cell.level] = problem
        handle.close()
    reasons = "; ".join(f"{level}: {reason}" for level, reason in refused.items())
    if wanted in ("auto", "bubblewrap") and "bubblewrap" not in refused:
        reasons = f"{reasons}; bubblewrap: not installed".removeprefix("; ")
    return None, reasons


def _ways(
    limits: jail.Limits, folder: str, packages: bool, wanted: str, workers: int
) -> Iterator[tuple[jail.Cell, tuple[str, str] | None]]:
    """Cells to try, strongest first, with the id maps that a user namespace of ours gets."""
    bubblewrap = shutil.which("bwrap") or ""
    is_root = os.geteuid() == 0
    spare = _spare_ids(2 * workers + 2) if is_root else None
    for level in jail.LEVELS:
        if wanted not in ("auto", level) or (level == "bubblewrap" and not bubblewrap):
            continue
        if level == "filters" and not filters.supported():
            continue
        ways: list[tuple[int | None, bool]] = [(spare, True)] if spare is not None else []
        ways.append((None, not is_root))
        for ids, bounded in ways:
            maps = None
            if level == "namespaces" and ids is not None:
                line = f"0 0 1\n1 {ids} {2 * workers + 2}"
                maps, ids = (line, line), 1
            yield jail.Cell(level, limits, folder, ids, bounded, packages, bubblewrap), maps


def _spare_ids(count: int) -> int | None:
    """The first of `count` user ids that belong to nobody, None where this namespace has no room."""
    rooms = []
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/self/{name}") as file:
            rooms.append([tuple(map(int, line.split())) for line in file])
    for start, _, size in rooms[0]:
        first = 2_000_000_000 if start + size > 2_000_000_000 + count else start + size - SPARE_IDS
        held = all(any(s <= first and first + count <= s + n for s, _, n in room) for room in rooms)
        if first > 1000 and held:
            return first
    return None


def _trial(cell: jail.Cell, worker: Judges) -> tuple[dict[str, bool], str]:
    """What the cell holds, and why it will not do ("" where it will)."""
    with socket.socket() as listener, tempfile.NamedTemporaryFile("w", suffix=".txt") as secret:
        victim = f"{cell.folder}/victim"
        os.close(os.open(victim, os.O_CREAT | os.O_WRONLY, 0o666))
        os.chmod(secret.name, 0o644)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        arguments = [listener.getsockname()[1], os.getpid(), secret.name, victim, cell.limits.memory]
        processes = cell.limits.processes
        tests = [_call("trial", arguments), _call("count", [processes])]
        (status, found), (_, started) = worker.judge([([PROGRAM], 0), ([PROGRAM], 1)], tests)
    if status != "right" or not found["writes"]:
        return {}, "Python does not run in it" if status != "right" else "it has no folder to write to"
    if found["user"] == 0 and cell.level == "limits":
        return {}, "programs would run as root, unconfined: start the run as another user"
    holds = {name: not found[name] for name in ("network", "files", "signals", "memory")}
    holds["processes"] = isinstance(started, int) and started < processes + SLACK_PROCESSES
    if cell.bounded and not (isinstance(started, int) and started >= processes // 2):
        return {}, f"programs may start {started} processes, {processes} are wanted"
    open_sides = [name for name, held in holds.items() if not held]
    if cell.level != "limits" and open_sides:
        return holds, f"it does not hold {', '.join(open_sides)}"
    return holds, ""


def _call(function: str, arguments: list[Any]) -> dict[str, Any]:
    return {"kind": "value", "function": function, "arguments": arguments}
