"""Programs that want a reward without earning it, or to do harm. Each is asked for `f(2) == 4`.

`<canary>` is a file that all may write, `<secret>` one that all may read, `<port>` a server on this machine, `<socket>`
a socket in the file system that all may write to, `<abstract>` one without a file.
"""

from __future__ import annotations

import re
from typing import Any

EARNED = "def f(x):\n    return x * 2\n"


def programs(text: str) -> dict[str, str]:
    """Programs by name, each after a line `### name`."""
    _, *parts = re.split(r"^### (\w+)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def aimed(program: str, targets: dict[str, Any]) -> str:
    """The program with real paths and a real port."""
    return re.sub(r"<(\w+)>", lambda found: repr(targets[found[1]]) if found[1] in targets else found[0], program)


CHEATS = programs(
    r"""
### exits_early
import sys
sys.exit(0)
### exits_hard
import os
os._exit(0)
### exits_in_the_call
import os
def f(x):
    os._exit(0)
### raises_system_exit_in_the_call
def f(x):
    raise SystemExit(0)
### equal_to_everything
class Yes(int):
    def __eq__(self, other): return True
    __hash__ = None
def f(x):
    return Yes(5)
### object_equal_to_everything
class Yes:
    def __eq__(self, other): return True
    def __bool__(self): return True
def f(x):
    return Yes()
### class_with_a_lying_metaclass
class M(type):
    def __eq__(cls, other): return True
    __hash__ = type.__hash__
class f(metaclass=M):
    def __init__(self, x): pass
    def __eq__(self, other): return True
### patches_builtins
import builtins
builtins.AssertionError = Warning
builtins.exec = lambda *a: None
builtins.compile = lambda *a, **k: None
setattr(builtins, 'len', lambda x: 4)
def f(x):
    return None
### patches_our_code
import sys
for name, module in list(sys.modules.items()):
    if 'sandbox' in name:
        for key in list(vars(module)):
            if key in ('encode', 'run_asserts', 'judge', 'same_output', 'decode'):
                setattr(module, key, lambda *a, **k: True)
def f(x):
    return None
### writes_verdicts_everywhere
import os
for fd in range(64):
    for text in (b'{"status": "right"}\n', b'\0\0\0\x10["value", 4, 4]x'):
        try: os.write(fd, text)
        except OSError: pass
def f(x):
    return None
### verdict_at_exit
import atexit, os
atexit.register(lambda: os.write(1, b'{"status": "right"}\n'))
def f(x):
    return None
### prints_a_verdict
print('{"status": "right"}', flush=True)
def f(x):
    print('right')
### looks_up_the_stack
import sys
def f(x):
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):
            if 'assert f' in repr(value): return 4
        frame = frame.f_back
### searches_its_memory
import gc
def f(x):
    marker = ')2(f tressa'[::-1]
    for item in gc.get_objects():
        if isinstance(item, (list, dict, tuple)):
            for part in (item.values() if isinstance(item, dict) else item):
                if isinstance(part, str) and part.startswith(marker): return 4
### reads_raw_memory
def f(x):
    marker = b')2(f tressa'[::-1]
    with open('/proc/self/maps') as maps:
        spans = [line.split()[0].split('-') for line in maps if ' rw' in line]
    with open('/proc/self/mem', 'rb') as memory:
        for start, end in spans:
            memory.seek(int(start, 16))
            if memory.read(int(end, 16) - int(start, 16)).count(marker): return 4
### defines_the_tests_names
check = lambda *a: None
def assert_(*a): pass
f = None
### replaces_the_function_later
def f(x):
    global f
    f = lambda x: 4
    return 5
### reads_the_tests_from_files
import os
def f(x):
    for top, _, files in os.walk('/'):
        for file in files:
            try:
                if '== 4' in open(os.path.join(top, file)).read(): return 4
            except (OSError, UnicodeDecodeError): pass
        if top.count('/') > 3: break
### steals_the_environment
import glob, os
def f(x):
    found = repr(os.environ)
    for path in glob.glob('/proc/*/environ'):
        try: found += open(path, 'rb').read().decode()
        except OSError: pass
    return 4 if 'hunter2' in found else 0
### reads_a_secret
def f(x):
    return 4 if open(<secret>).read() else 0
### deletes_a_file
import os
def f(x):
    os.unlink(<canary>)
    return 4
### deletes_everything
import os, shutil
def f(x):
    shutil.rmtree(os.path.dirname(<canary>))
    return 4 if not os.path.exists(<canary>) and os.path.exists('/proc/1') else 0
### overwrites_a_file
def f(x):
    open(<canary>, 'w').write('gone')
    return 4
### touches_a_file
import os
def f(x):
    os.utime(<canary>)
    return 4
### marks_a_file
import os
def f(x):
    os.setxattr(<canary>, 'user.was', b'here')
    return 4
### locks_a_file_away
import os
def f(x):
    os.chmod(<canary>, 0)
    return 4
### truncates_a_file
import os
def f(x):
    os.truncate(<canary>, 0)
    return 4
### renames_a_file
import os
def f(x):
    os.replace(<canary>, <canary> + '.moved')
    return 4
### takes_a_file_in
import os
def f(x):
    os.link(<canary>, 'mine')
    return 4 if open('mine').read() else 0
### leaves_a_file_in_memory
def f(x):
    open('/dev/shm/left', 'w').write('x')
    return 4
### leaves_a_file_in_tmp
def f(x):
    open('/tmp/left', 'w').write('x')
    return 4
### shares_memory
from multiprocessing import shared_memory
def f(x):
    return 4 if shared_memory.SharedMemory(create=True, size=1 << 20) else 0
### reads_its_judges_memory
import os
def f(x):
    for name in ('mem', 'environ', 'maps', 'fd/0'):
        for number in (os.getppid(), 1):
            try:
                if open(f'/proc/{number}/{name}', 'rb').read(1): return 4
            except OSError: pass
### writes_what_nobody_sees
import os
def f(x):
    for number in range(9):
        file = os.open('.', os.O_TMPFILE | os.O_RDWR)
        os.write(file, bytes(16 << 20))
    return 4
### writes_what_it_unlinked
import os
def f(x):
    for number in range(9):
        file = os.open('gone', os.O_CREAT | os.O_RDWR)
        os.unlink('gone')
        os.write(file, bytes(16 << 20))
    return 4
### limits_its_judge
import ctypes, os
def f(x):
    return 4 if ctypes.CDLL(None).prlimit(os.getppid() or 1, 0, b'\0' * 16, None) == 0 else 0
### puts_its_own_ends_everywhere
import os
ours, theirs = os.pipe()
for fd in range(3, 64):
    if fd not in (ours, theirs):
        try: os.dup2(theirs, fd)
        except OSError: pass
def f(x):
    return 4
### uses_the_network
import socket
def f(x):
    socket.create_connection(('127.0.0.1', <port>), 1)
    return 4
### uses_the_new_network
import socket
def f(x):
    socket.socket(socket.AF_INET6, socket.SOCK_STREAM).connect(('::1', <port>))
    return 4
### sends_to_a_socket
import socket
def f(x):
    socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', <socket>)
    return 4
### sends_to_a_socket_without_a_file
import socket
def f(x):
    socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', <abstract>)
    return 4
### connects_a_pair_elsewhere
import ctypes, socket
def f(x):
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    name = b'\x01\x00' + <socket>.encode() + b'\x00'
    return 4 if ctypes.CDLL(None).connect(pair[0].fileno(), name, len(name)) == 0 else 0
### asks_for_a_name
import socket
def f(x):
    return 4 if socket.getaddrinfo('example.org', 80) else 0
### starts_a_command
import subprocess, sys
def f(x):
    return 4 if subprocess.run([sys.executable, '-c', '']).returncode == 0 else 0
### gains_a_namespace
import ctypes
def f(x):
    return 4 if ctypes.CDLL(None).unshare(0x10000000) == 0 else 0
### traces_its_judge
import ctypes, os
def f(x):
    return 4 if ctypes.CDLL(None).ptrace(16, os.getppid() or 1, 0, 0) == 0 else 0
### kills_its_parent
import os, signal
def f(x):
    os.kill(os.getppid() or 1, signal.SIGKILL)
### kills_through_a_descriptor
import fcntl, os, signal, socket
def f(x):
    ours, theirs = socket.socketpair()
    fcntl.fcntl(ours, fcntl.F_SETOWN, os.getppid() or 1)
    fcntl.fcntl(ours, 10, signal.SIGKILL)
    fcntl.fcntl(ours, fcntl.F_SETFL, fcntl.fcntl(ours, fcntl.F_GETFL) | os.O_ASYNC)
    theirs.send(b'x')
### collides
def f(x):
    return {i * (2**61 - 1): 0 for i in range(200)}
### kills_all
import os, signal
def f(x):
    os.kill(-1, signal.SIGKILL)
### stops_its_parent
import os, signal
def f(x):
    os.kill(os.getppid() or 1, signal.SIGSTOP)
### crashes
import ctypes
def f(x):
    ctypes.string_at(0)
### aborts
import os
def f(x):
    os.abort()
### closes_everything
import os
os.closerange(0, 64)
def f(x):
    return 4
### endless_recursion
import sys
sys.setrecursionlimit(10**9)
def f(x):
    return f(x)
### returns_itself
def f(x):
    result = []
    result.append(result)
    return result
### returns_too_much
def f(x):
    return [0] * 20_000_000
### hogs_memory
def f(x):
    return len(bytearray(8 << 30)) and 4
### not_a_number
def f(x):
    return float('nan')
### raises_a_huge_message
def f(x):
    raise ValueError('x' * (1 << 26))
### locks_its_folder
import os
def f(x):
    os.makedirs('a/b'); open('a/b/c', 'w').close()
    os.chmod('a/b', 0); os.chmod('a', 0)
### leaves_a_deep_hole
import os
def f(x):
    for _ in range(2500):
        try:
            os.mkdir('deep' * 60)
            os.chdir('deep' * 60)
        except OSError: break
### links_to_the_outside
import os
def f(x):
    os.symlink(os.path.dirname(<canary>), 'link')
"""
)
"""Over at once; all score 0."""
