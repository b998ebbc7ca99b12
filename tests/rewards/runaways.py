"""Programs that do not end, or take all there is. Each is asked for `f(2) == 4`."""

from __future__ import annotations

from tests.rewards.hostile import programs

RUNAWAYS = programs(
    r"""
### sleeps
import time
def f(x):
    time.sleep(1000)
    return 4
### spins
def f(x):
    while True: pass
### spins_in_c
def f(x):
    return 9 ** 9 ** 9
### spins_at_import
while True: pass
### ignores_signals
import signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
def f(x):
    while True: time.sleep(1)
### bombs_with_forks
import os
def f(x):
    while True:
        try: os.fork()
        except OSError: pass
### bombs_and_leaves
import os
def f(x):
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            while True:
                try:
                    if os.fork() == 0: os.setsid()
                except OSError: pass
    os._exit(0)
### bombs_with_threads
import threading, time
def f(x):
    while True:
        try: threading.Thread(target=time.sleep, args=(1000,)).start()
        except RuntimeError: pass
### prints_without_end
def f(x):
    while True: print('x' * 10_000)
### fills_the_disk
import os
def f(x):
    number = 0
    while True:
        number += 1
        try:
            with open(f'file{number}', 'wb') as file: file.write(bytes(1 << 20))
        except OSError: pass
### has_a_name_that_is_no_text
import ctypes, time
def f(x):
    ctypes.CDLL(None).prctl(15, b'\xff) R \xfe', 0, 0, 0)
    time.sleep(1000)
### digs_itself_in
import os, time
def f(x):
    for _ in range(3000):
        try:
            os.mkdir('deep' * 60)
            os.chdir('deep' * 60)
        except OSError: break
    time.sleep(1000)
### shuts_the_door_behind_it
import os, time
def f(x):
    os.umask(0o777)
    for number in range(3):
        os.mkdir(str(number))
    time.sleep(1000)
### hogs_with_children
import os, time
def f(x):
    for _ in range(12):
        if os.fork() == 0:
            held = bytearray(os.urandom(1 << 20)) * 200
            time.sleep(1000)
    time.sleep(1000)
### hides_a_child
import os, time
def f(x):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
    return 5
### never_answers
import os, time
time.sleep(1000)
### yields_without_end
def f(x):
    n = 0
    while True:
        yield n
### waits_for_input
def f(x):
    import select
    select.select([], [], [])
"""
)
"""Most would run for ever; all score 0, as "timeout" or "wrong"."""
