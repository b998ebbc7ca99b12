"""The system calls that Python 3.11 does not offer: namespaces, mounts, capabilities, process settings. Linux only."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

NEW_MOUNTS = 0x00020000
NEW_HOSTNAME = 0x04000000
NEW_IPC = 0x08000000
NEW_USERS = 0x10000000
NEW_PIDS = 0x20000000
NEW_NETWORK = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = 4096, 16384, 1 << 18, 1 << 21
MNT_DETACH = 2
ST_RELATIME = 4096
KEPT_FLAGS = MS_NOSUID | MS_NODEV | MS_NOEXEC | 1024 | 2048
"""Mount flags with the same number in `statvfs`."""

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 4, 22
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38

_CAPABILITY_VERSION = 0x20080522
_CALLS = {
    "x86_64": {"pivot_root": 155, "capset": 126},
    "aarch64": {"pivot_root": 41, "capset": 91},
}
_LANDLOCK = {"landlock_create_ruleset": 444, "landlock_add_rule": 445, "landlock_restrict_self": 446}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def machine() -> str:
    """Name of the processor's architecture."""
    return platform.machine()


def call(name: str, *arguments: int | bytes | None) -> int:
    """One system call by name.

    Raises:
        OSError: it failed, or its number on this architecture is not known.
    """
    number = {**_LANDLOCK, **_CALLS.get(machine(), {})}.get(name)
    if number is None:
        raise OSError(38, f"the number of {name} on {machine()} is not known")
    words = [ctypes.c_long(a) if isinstance(a, int) else ctypes.c_char_p(a) for a in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *words), name)


def unshare(flags: int) -> None:
    """Leave the given namespaces for new ones."""
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def prctl(option: int, value: int, pointer: ctypes.c_void_p | None = None) -> None:
    """Change a setting of this process."""
    third = pointer if pointer is not None else ctypes.c_ulong(0)
    zero = ctypes.c_ulong(0)
    _checked(_libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), third, zero, zero), "prctl")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Mount a file system, or bind a path."""
    words = [None if word is None else word.encode() for word in (source, target, kind)]
    data = None if options is None else options.encode()
    _checked(_libc.mount(*words, ctypes.c_ulong(flags), data), f"mount {target}")


def bind_read_only(source: str, target: str) -> None:
    """Show `source` at `target`, unchangeable. Flags that the source's mount must keep are kept."""
    mount(source, target, None, MS_BIND | MS_REC)
    present = os.statvfs(target).f_flag
    kept = (present & KEPT_FLAGS) | (MS_RELATIME if present & ST_RELATIME else 0)
    mount("none", target, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | kept)


def enter_root(folder: str) -> None:
    """Make a folder the root of the mount namespace and let go of everything else."""
    mount(folder, folder, None, MS_BIND | MS_REC)
    os.chdir(folder)
    call("pivot_root", b".", b".")
    _checked(_libc.umount2(b".", ctypes.c_int(MNT_DETACH)), "umount the old root")
    os.chdir("/")


def drop_capabilities() -> None:
    """Give up every privilege that the user id does not carry."""
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    call("capset", header, bytes(24))


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return int(result)
