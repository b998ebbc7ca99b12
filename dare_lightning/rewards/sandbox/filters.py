"""What the kernel refuses a process, without any namespace or privilege: seccomp and Landlock."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from functools import cache

from dare_lightning.rewards.sandbox import kernel

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000

# Numbers on x86_64 and aarch64; above 423 they are the same everywhere.
_SIGNALS = {
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
}  # fmt: skip
_DENIED = {
    # Network, and shared memory that would outlive the process or escape its limits.
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
    # Other processes.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "migrate_pages": (256, 238), "move_pages": (279, 239),
    # Other executables; nothing that a program under test has to do needs one.
    "execve": (59, 221), "execveat": (322, 281),
    # Namespaces, mounts and the system as a whole.
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "personality": (135, 92), "syslog": (103, 116),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "acct": (163, 89), "quotactl": (179, 60), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266), "sethostname": (170, 161),
    "setdomainname": (171, 162),
}  # fmt: skip
# What no rule of Landlock covers, though it changes files that can only be seen.
_ATTRIBUTES = {
    "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, -1),
    "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54), "utime": (132, -1), "utimes": (235, -1),
    "futimesat": (261, -1), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "setxattrat": (463, 463),
    "removexattrat": (466, 466), "file_setattr": (469, 469), "openat2": (437, 437),
}  # fmt: skip
_FORKS = {"fork": (57, -1), "vfork": (58, -1)}
_CLONE, _CLONE3, _PRCTL, _PRLIMIT = (56, 220), (435, 435), (157, 167), (302, 261)
_FCNTL, _IOCTL, _SOCKETPAIR = (72, 25), (16, 29), (53, 199)
_KIND_OF_SOCKET, _STREAM = 0xF, 1
_OPEN, _OPENAT, _NAMELESS = (2, -1), (257, 56), 0x400000
# A descriptor can be told to send signals to another process.
_OWNER_COMMANDS = {_FCNTL: (8, 10, 15), _IOCTL: (0x8901, 0x8902)}
_NEW_NAMESPACES = 0x7E020000
_CLONE_THREAD = 0x00010000
_EPERM, _ENOSYS = 1, 38
_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16

# Landlock: rights by the version that brought them.
_READ, _EXECUTE, _WRITE, _TRUNCATE, _CONTROL = 0b1100, 1, 1 << 1, 1 << 14, 1 << 15
_FILE_RIGHTS = _EXECUTE | _WRITE | (1 << 2) | _TRUNCATE | _CONTROL
_RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: _TRUNCATE, 5: _CONTROL}
_OWN_FOLDER = _READ | _WRITE | _TRUNCATE | (1 << 13) | sum(1 << bit for bit in (7, 8, 10, 12))
"""Everything but executing, sockets and devices, and removing: a file without a name has a size that nobody sees."""
_REMOVE = (1 << 4) | (1 << 5)
_TCP, _SCOPES = 0b11, 0b11
_OLDEST = 3
"""Before this version of Landlock a file may be emptied by whoever can see it."""


def supported() -> bool:
    """Whether both seccomp (on this architecture) and a Landlock that keeps files whole can be asked for."""
    return kernel.machine() in MACHINES and landlock_version() >= _OLDEST


def landlock_version() -> int:
    """0 where the kernel has no Landlock."""
    try:
        return kernel.call("landlock_create_ruleset", None, 0, 1)
    except OSError:
        return 0


def deny_system_calls(signals: bool, forks: bool, own_files: bool) -> None:
    """Refuse, for good and for all children, what a program under test has no use for.

    Args:
        signals: whether signals may be sent. Without a process namespace they reach others.
        forks: whether processes may be started; threads always may.
        own_files: whether every file that the process reaches is its own. Else it may neither change the mode, owner,
            times and marks of files, which its user may own, nor make files without a name, whose size nobody sees.
    """
    lines = filter_program(signals, forks, own_files)
    program = ctypes.create_string_buffer(lines)
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(lines) // 8, ctypes.addressof(program)))
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.prctl(kernel.PR_SET_SECCOMP, 2, ctypes.c_void_p(ctypes.addressof(header)))


@cache
def filter_program(signals: bool, forks: bool, own_files: bool) -> bytes:
    """The rules of `deny_system_calls` as the kernel reads them."""
    column = list(MACHINES).index(kernel.machine())
    denied = {**_DENIED, **({} if signals else _SIGNALS), **({} if forks else _FORKS)}
    denied |= {} if own_files else _ATTRIBUTES
    lines = [
        _line(_LOAD, _ARCHITECTURE),
        _line(_EQUAL, MACHINES[kernel.machine()], 1, 0),
        _line(_RETURN, _KILL),
        _line(_LOAD, _NUMBER),
        _line(_AT_LEAST, _X32, 0, 1),
        _line(_RETURN, _ERROR | _EPERM),
        # Its flags lie in memory, out of a filter's reach: as if it did not exist, so the C library takes `clone`.
        _line(_EQUAL, _CLONE3[column], 0, 1),
        _line(_RETURN, _ERROR | _ENOSYS),
    ]
    for numbers in denied.values():
        if numbers[column] >= 0:
            lines += [_line(_EQUAL, numbers[column], 0, 1), _line(_RETURN, _ERROR | _EPERM)]
    lines += _if_argument(_CLONE[column], _line(_ANY_BIT, _NEW_NAMESPACES, 0, 1))
    if not forks:
        lines += _if_argument(_CLONE[column], _line(_ANY_BIT, _CLONE_THREAD, 1, 0))
    lines += _if_argument(_PRLIMIT[column], _line(_EQUAL, 0, 1, 0))
    # A pair of the other kinds can send to any socket of the machine.
    stream = _line(_AND, _KIND_OF_SOCKET) + _line(_EQUAL, _STREAM, 1, 0)
    lines += _if_argument(_SOCKETPAIR[column], stream, argument=1)
    for numbers, argument in ((_OPEN, 1), (_OPENAT, 2)) if not own_files else ():
        lines += _if_argument(numbers[column], _line(_ANY_BIT, _NAMELESS, 0, 1), argument)
    lines += _if_argument(_PRCTL[column], _line(_EQUAL, kernel.PR_SET_PDEATHSIG, 0, 1))
    for numbers, commands in ({} if signals else _OWNER_COMMANDS).items():
        for command in commands:
            lines += _if_argument(numbers[column], _line(_EQUAL, command, 0, 1), argument=1)
    lines.append(_line(_RETURN, _ALLOW))
    return b"".join(lines)


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _if_argument(number: int, test: bytes, argument: int = 0) -> list[bytes]:
    """Refuse the call where the test of an argument goes on to the next line."""
    return [
        _line(_EQUAL, number, 0, 3 + len(test) // 8),
        _line(_LOAD, _ARGUMENTS + 8 * argument),
        test,
        _line(_RETURN, _ERROR | _EPERM),
        _line(_LOAD, _NUMBER),
    ]


class FileRules:
    """Which files a process may touch from `enter` on; rules that were entered before keep their force.

    Paths are looked up when the object is made. It may be made once and entered by many processes.

    Args:
        readable: files and folders.
        writable: folders in which files can be made and changed.
        devices: files that can be read and written.
        scoped: whether signals and abstract sockets are kept inside, where the kernel can.
        removes: whether files can be removed from the writable folders.
    """

    def __init__(
        self,
        readable: Iterable[str],
        writable: Iterable[str],
        devices: Iterable[str],
        scoped: bool = True,
        removes: bool = False,
    ) -> None:
        version = landlock_version()
        self._rights = sum(rights for since, rights in _RIGHTS.items() if since <= version)
        words = [self._rights]
        if version >= 4:
            words.append(_TCP)
        if version >= 6:
            words.append(_SCOPES if scoped else 0)
        attributes = struct.pack(f"{len(words)}Q", *words)
        self.descriptor = kernel.call("landlock_create_ruleset", attributes, len(attributes), 0)
        for path in readable:
            self._allow(path, _READ)
        for path in writable:
            self._allow(path, _OWN_FOLDER | (_REMOVE if removes else 0))
        for path in devices:
            self._allow(path, _READ | _WRITE)

    def enter(self) -> None:
        """Apply the rules to this process and its children, for good."""
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.call("landlock_restrict_self", self.descriptor, 0)

    def _allow(self, path: str, rights: int) -> None:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            rights &= self._rights if os.path.isdir(path) else self._rights & _FILE_RIGHTS
            kernel.call("landlock_add_rule", self.descriptor, 1, struct.pack("=Qi", rights, descriptor), 0)
        finally:
            os.close(descriptor)
