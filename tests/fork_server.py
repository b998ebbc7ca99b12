"""A Python that has imported everything heavy and becomes, once forked, whatever program it is asked for.

`python -m tests.fork_server <fd>`, started by `tests/processes.py` and shared by the workers of a test run. Nothing but
imports is shared with a child: it has its own session, streams, environment, folder and arguments, runs `__main__` of
its module as `python -m` does, and ends as an interpreter ends. The server starts no thread, so that a fork copies
everything there is.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import threading
from dataclasses import dataclass

PRELOADED = (
    "dare_lightning.cli.commands.evaluate",
    "dare_lightning.cli.commands.export",
    "dare_lightning.cli.commands.fit",
    "dare_lightning.cli.commands.generate",
    "dare_lightning.cli.commands.preview",
    "dare_lightning.cli.sweep",
)
FRESH = "DARE_FRESH_PROCESSES"
ANSWER = struct.Struct("!q")
# `select` does not see a child end.
_SECONDS_BETWEEN_LOOKS = 0.02


@dataclass(frozen=True)
class Command:
    """What a child is to become: `module` with these arguments, started in `cwd` with `environment`."""

    module: str
    words: list[str]
    cwd: str
    environment: dict[str, str]


def serve(listener: socket.socket) -> Command | None:
    """Fork a child for each request until nobody is connected any more; returns in every child what it is to run.

    A request is one byte with four descriptors: input, output, errors, and a channel on which the command comes and the
    process id and the exit status go. Whoever closes a channel wants its child dead.
    """
    running: dict[int, socket.socket] = {}
    controls = [listener.accept()[0]]
    listener.setblocking(False)
    while controls:
        watched = [listener, *controls, *running.values()]
        ready = select.select(watched, [], [], _SECONDS_BETWEEN_LOOKS if running else None)[0]
        _look_after(running, ready)
        for control in [control for control in controls if control in ready]:
            asked, descriptors, _, _ = socket.recv_fds(control, 1, 4)
            if not asked:
                controls.remove(control)
                continue
            channel = socket.socket(fileno=descriptors[3])
            with channel.makefile() as stream:
                command = Command(**json.loads(stream.readline()))
            process = os.fork()
            if process == 0:
                _take_over(descriptors[:3], [listener, *controls, channel, *running.values()])
                return command
            for descriptor in descriptors[:3]:
                os.close(descriptor)
            _tell(channel, process)
            running[process] = channel
        with contextlib.suppress(BlockingIOError):
            controls.append(listener.accept()[0])
    _look_after(running, list(running.values()))
    return None


def _look_after(running: dict[int, socket.socket], ready: list[socket.socket]) -> None:
    for process, channel in running.items():
        if channel in ready:
            os.kill(process, signal.SIGKILL)
    for process in list(running):
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            channel = running.pop(process)
            _tell(channel, os.waitstatus_to_exitcode(status))
            channel.close()


def _tell(channel: socket.socket, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
        channel.sendall(ANSWER.pack(number))


def _take_over(streams: list[int], others: list[socket.socket]) -> None:
    os.setsid()
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for other in others:
        other.close()


def become(command: Command) -> None:
    """Run a command as `python -m` would."""
    os.chdir(command.cwd)
    if FRESH in os.environ:
        os.execve(sys.executable, [sys.executable, "-m", command.module, *command.words], command.environment)
    os.environ.clear()
    os.environ.update(command.environment)
    sys.path[0] = command.cwd
    sys.argv = [command.module, *command.words]
    try:
        runpy.run_module(command.module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            raise
        _leave(end.code or 0)


def _leave(status: int) -> None:
    """End as an interpreter does, but for taking apart every module, which would copy all that a fork shares."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    gc.disable()
    for module in PRELOADED if FRESH not in os.environ else ():
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    wanted = serve(socket.socket(fileno=int(sys.argv[1])))
    if wanted is not None:
        become(wanted)
