"""How a process is shut in: which layers there are, and the steps of entering them."""

from __future__ import annotations

import os
import resource
import signal
import site
import sys
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dare_lightning.rewards.sandbox import filters, kernel

Level = Literal["bubblewrap", "namespaces", "filters", "limits"]

LEVELS: tuple[Level, ...] = ("bubblewrap", "namespaces", "filters", "limits")
"""Strongest first. The two first hide everything outside; "filters" forbids it; "limits" only bounds resources."""

DEVICES = ("null", "zero", "random", "urandom")
MAX_FILES = 4096
OPEN_FILES = 64
BOX = "/box"
"""The working folder, where a program has a root of its own; nothing that Python needs lies below it."""
CODE = "/code"
"""Where our own code lies inside bubblewrap."""
STACK = 256 << 20
JUDGE_MEMORY = 512 << 20
"""What a judge may need beyond the program's memory."""
_BOTH = (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK)


@dataclass(frozen=True)
class Limits:
    """Bounds of one program.

    Attributes:
        timeout_s: wall-clock time for all its tests, seconds.
        memory: address space of each process, and resident memory of all together, bytes.
        processes: processes and threads at the same time, its own first one included.
        file: size of a file, bytes.
        disk: size of everything in its folder, bytes.
        output: what it may print in one run, or return from one call, bytes.
    """

    timeout_s: float
    memory: int
    processes: int
    file: int
    disk: int
    output: int


@dataclass(frozen=True)
class Cell:
    """One way of shutting programs in.

    Attributes:
        level: which layers.
        limits: the bounds.
        folder: where working folders and the bare root are made.
        ids: first of the spare user ids that judges and programs run under; None: the caller's own.
        bounded: whether the kernel counts the processes of a program; where it does not, it may start none.
        packages: whether programs may import installed packages beside the standard library.
        bubblewrap: path of its executable.
    """

    level: Level
    limits: Limits
    folder: str
    ids: int | None = None
    bounded: bool = True
    packages: bool = False
    bubblewrap: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Cell:
        """What `to_dict` wrote."""
        return cls(**{**fields, "limits": Limits(**fields["limits"])})

    @property
    def own_pids(self) -> bool:
        """Whether a program sees no process and no file but its own."""
        return self.level in ("bubblewrap", "namespaces")

    @property
    def filtered(self) -> bool:
        """Whether system calls and files are forbidden one by one."""
        return self.level != "limits"

    @property
    def root(self) -> str:
        """Where the bare root is built."""
        return f"{self.folder}/root"

    def program_id(self, slot: int) -> int | None:
        """User id of the program in a slot."""
        return None if self.ids is None else self.ids + 2 * slot

    def judge_id(self, slot: int) -> int | None:
        """User id of its judge: another one where nothing else keeps the program from its judge."""
        return None if self.ids is None else self.ids + 2 * slot + (not self.own_pids)


@dataclass(frozen=True)
class Place:
    """Where one program runs.

    Attributes:
        cell: how it is shut in.
        slot: which of the cell's user ids it has.
        name: what its run is called.
        tasks: how many tasks the kernel counts against its limit that are not its own.
        paths: what it may read.
        code_root: the folder that holds our package.
        rules: file rules for programs and for judges that were made beforehand; they only lack the program's folder.
    """

    cell: Cell
    slot: int
    name: str
    tasks: int
    paths: list[str]
    code_root: str
    rules: tuple[filters.FileRules, filters.FileRules] | None = None

    @property
    def kept(self) -> tuple[int, ...]:
        """Descriptors that must stay open until both are shut in."""
        return () if self.rules is None else tuple(rules.descriptor for rules in self.rules)


def readable(packages: bool) -> list[str]:
    """What Python needs to run: standard library, shared libraries, time zones; installed packages only if asked.

    They may hold the very answers that a program should find.
    """
    paths = {sysconfig.get_path("stdlib"), os.path.dirname(os.__file__), "/usr/share/zoneinfo", "/etc/ld.so.cache"}
    hidden = {os.path.realpath(path) for path in package_folders()}
    with open("/proc/self/maps") as maps:
        files = {line.split()[-1] for line in maps if "/" in line}
    for folder in {os.path.dirname(os.path.realpath(file)) for file in files if ".so" in file}:
        # A folder that holds installed packages somewhere below is not shown as a whole.
        below = any(path.startswith(f"{folder}/") for path in (*hidden, os.path.realpath(os.__file__)))
        libraries = [str(file) for file in Path(folder).glob("*.so*")]
        inside = any(folder.startswith(f"{os.path.realpath(path)}/") for path in paths)
        paths.update([] if inside else libraries if below else [folder])
    if packages:
        paths.update([path for path in site.getsitepackages() if os.path.isdir(path)])
    return sorted({os.path.realpath(path) for path in paths if os.path.exists(path)})


def package_folders() -> list[str]:
    """Where packages are installed beside or inside the standard library."""
    stdlib = sysconfig.get_path("stdlib")
    names = [f"{stdlib}/site-packages", f"{stdlib}/dist-packages"]
    return [path for path in names if os.path.isdir(path)]


def without_packages(paths: list[str]) -> list[str]:
    """The same paths, where one that holds installed packages is replaced by everything else in it."""
    hidden = {os.path.realpath(path) for path in package_folders()}
    result = []
    for path in paths:
        if any(inner.startswith(f"{path}/") for inner in hidden):
            result += [entry.path for entry in os.scandir(path) if entry.path not in hidden]
        else:
            result.append(path)
    return result


# The root that programs see, built once by the zygote in its own namespace.


def build_root(cell: Cell) -> None:
    """Bind what Python needs, read-only, into an empty root. Needs a mount namespace of one's own."""
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    root = cell.root
    os.makedirs(root, exist_ok=True)
    kernel.mount("none", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
    for path in readable(cell.packages):
        _bind(root, path)
    for device in DEVICES:
        _bind(root, f"/dev/{device}", read_only=False)
    if not cell.packages:
        for path in package_folders():
            kernel.mount("none", f"{root}{os.path.realpath(path)}", "tmpfs", kernel.MS_RDONLY, "size=4k")
    for link in ("/lib", "/lib64", "/usr/lib64", "/bin"):
        if os.path.islink(link) and not os.path.lexists(root + link):
            os.makedirs(os.path.dirname(root + link), exist_ok=True)
            os.symlink(os.readlink(link), root + link)
    os.mkdir(root + BOX)
    flags = kernel.MS_REMOUNT | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("none", root, None, flags, "mode=755,size=1m")


def _bind(root: str, path: str, read_only: bool = True) -> None:
    target = root + path
    if os.path.lexists(target):
        return
    os.makedirs(target if os.path.isdir(path) else os.path.dirname(target), exist_ok=True)
    if not os.path.isdir(path):
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    if read_only:
        kernel.bind_read_only(path, target)
    else:
        kernel.mount(path, target, None, kernel.MS_BIND)


# What a judge does before it forks the program, and what each of the two does to itself.


def prepare(place: Place) -> str:
    """Leave the outside world behind where the level says so; the program's working folder."""
    cell = place.cell
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    # Should the machine run out of memory, a program goes first and not the training run.
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    if cell.level == "namespaces":
        users = kernel.NEW_USERS if cell.ids is None else 0
        own = (os.getuid(), os.getgid())
        kernel.unshare(users | kernel.NEW_PIDS | kernel.NEW_MOUNTS | kernel.NEW_IPC)
        if users:
            map_self(*own)
        options = f"mode=777,size={cell.limits.disk},nr_inodes={MAX_FILES}"
        flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
        kernel.mount("none", cell.root + BOX, "tmpfs", flags, options)
        kernel.enter_root(cell.root)
        return BOX
    if cell.level == "bubblewrap":
        return BOX
    folder = f"{cell.folder}/{place.name}"
    os.mkdir(folder, 0o700)
    owner = cell.program_id(place.slot)
    if owner is not None:
        os.chown(folder, owner, owner)
    return folder


def map_self(uid: int, gid: int) -> None:
    """Be user 0 of a new user namespace, which is the user one was."""
    for name, line in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)


def confine_program(place: Place, folder: str) -> None:
    """Shut this process in as the program."""
    cell, limits = place.cell, place.cell.limits
    os.chdir(folder)
    bounds = {
        resource.RLIMIT_AS: limits.memory,
        resource.RLIMIT_CPU: int(limits.timeout_s) + 2,
        resource.RLIMIT_FSIZE: limits.file,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_NPROC: limits.processes + place.tasks,
        resource.RLIMIT_STACK: min(STACK, limits.memory // 4),
    }
    rules = None
    if cell.filtered and filters.landlock_version():
        devices = [f"/dev/{name}" for name in DEVICES]
        rules = filters.FileRules(place.paths, [folder], devices, removes=cell.own_pids)
    _settle(bounds, None if cell.level == "bubblewrap" else cell.program_id(place.slot))
    if place.rules is not None:
        place.rules[0].enter()
    if rules is not None:
        rules.enter()
    if cell.filtered:
        filters.deny_system_calls(signals=cell.own_pids, forks=True, own_files=cell.own_pids)


def confine_judge(place: Place) -> None:
    """Shut this process in as a judge: it runs the data set's tests, which nobody has read either."""
    cell, limits = place.cell, place.cell.limits
    bounds = {
        resource.RLIMIT_AS: limits.memory + JUDGE_MEMORY,
        resource.RLIMIT_FSIZE: limits.file,
        resource.RLIMIT_NOFILE: OPEN_FILES,
    }
    rules = None
    if place.rules is not None:
        rules = place.rules[1]
    elif cell.filtered and filters.landlock_version():
        rules = filters.FileRules(place.paths, [], ["/dev/null"], scoped=False)
    _settle(bounds, cell.judge_id(place.slot))
    if rules is not None:
        rules.enter()
    if cell.filtered:
        filters.deny_system_calls(signals=True, forks=False, own_files=cell.own_pids)


def shared_rules(cell: Cell, paths: list[str]) -> tuple[filters.FileRules, filters.FileRules]:
    """File rules for all programs, and for all judges, without the installed packages that lie among the paths.

    Naming everything but them takes hundreds of rules, too many to make for each program anew.
    """
    fine = without_packages(paths)
    devices = [f"/dev/{name}" for name in DEVICES]
    return filters.FileRules(fine, [cell.folder], devices), filters.FileRules(fine, [], ["/dev/null"], scoped=False)


def forbid_processes() -> None:
    """No further process, where the kernel would not count them."""
    if kernel.machine() in filters.MACHINES:
        filters.deny_system_calls(signals=True, forks=False, own_files=True)


def _settle(bounds: dict[int, int], user: int | None) -> None:
    for name in _BOTH:
        bounds[name] = 0
    for name, value in bounds.items():
        _, hard = resource.getrlimit(name)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)


# bubblewrap.


def bubblewrap_command(place: Place, program: list[str]) -> list[str]:
    """The command line that starts a program of ours inside bubblewrap."""
    cell = place.cell
    executable = os.path.realpath(sys.executable)
    words = [cell.bubblewrap, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    for path in [*place.paths, executable]:
        words += ["--ro-bind", path, path]
    for path in [] if cell.packages else package_folders():
        words += ["--size", "4096", "--tmpfs", os.path.realpath(path)]
    for link in ("/lib", "/lib64", "/usr/lib64"):
        if os.path.islink(link):
            words += ["--symlink", os.readlink(link), link]
        elif os.path.isdir(link):
            words += ["--ro-bind", link, link]
    for device in DEVICES:
        words += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    for path in ("__init__.py", "rewards/__init__.py", "rewards/sandbox"):
        words += ["--ro-bind", f"{place.code_root}/dare_lightning/{path}", f"{CODE}/dare_lightning/{path}"]
    return [*words, "--size", str(cell.limits.disk), "--tmpfs", BOX, "--chdir", BOX, "--", executable, *program]
