"""What the processes of a program use, read from /proc."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Task:
    """A process as `/proc` shows it.

    Attributes:
        parent: id of its parent.
        state: one letter; Z is dead, T is stopped.
        threads: how many.
        memory: resident, bytes.
    """

    parent: int
    state: str
    threads: int
    memory: int


def processes() -> dict[int, Task]:
    """Every process that can be seen."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()  # a name before it may be any bytes
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
            found[int(name)] = Task(int(fields[1]), fields[0].decode(), int(fields[17]), int(fields[21]) * PAGE)
    return found


def descendants(root: int, seen: dict[int, Task], without: Collection[int] = ()) -> list[int]:
    """Living processes below one, without those below `without`."""
    children = defaultdict(list)
    for number, task in seen.items():
        children[task.parent].append(number)
    result, waiting = [], list(children[root])
    while waiting:
        number = waiting.pop()
        if number not in without:
            waiting += children[number]
            if seen[number].state != "Z":
                result.append(number)
    return result


def tasks_of(user: int) -> int:
    """Processes and threads of a user."""
    total = 0
    for number, task in processes().items():
        try:
            total += task.threads if os.stat(f"/proc/{number}").st_uid == user else 0
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


def waited(numbers: Collection[int]) -> float:
    """For how many seconds these processes were ready to run and no processor was free; 0 where nobody counts."""
    total = 0
    for number in numbers:
        try:
            with open(f"/proc/{number}/schedstat") as file:
                total += int(file.read().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total / 1e9


def folder_size(folder: str, most: int) -> tuple[int, int]:
    """Bytes and entries of a folder; one in it that cannot be read, or lies too deep, counts for over `most` bytes."""
    size = entries = 0
    waiting = [folder]
    while waiting and entries <= most and size <= most:
        try:
            for entry in os.scandir(waiting.pop()):
                entries += 1
                size += entry.stat(follow_symlinks=False).st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
        except FileNotFoundError:
            continue
        except OSError:
            return most + 1, entries
    return size, entries
