"""Forked commands are processes like any other."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests import processes
from tests.processes import Process, environment

PROBE = """
import atexit, os, sys, threading, time
atexit.register(print, "left in order", flush=True)
print(os.getcwd(), sys.argv[1:], os.environ.get("MINE"), os.getsid(0) == os.getpid(), threading.active_count())
print("to errors", file=sys.stderr)
if sys.argv[1:] == ["waits"]:
    print("ready", flush=True)
    time.sleep(60)
if sys.argv[1:] == ["breaks"]:
    raise ValueError("broken")
sys.exit(7)
"""


@pytest.fixture
def probe(tmp_path: Path) -> Path:
    """A folder with a program in it, `probe`."""
    (tmp_path / "probe.py").write_text(PROBE)
    return tmp_path


def test_a_program_has_its_own_folder_words_environment_session_streams_and_status(probe: Path) -> None:
    done = processes.run("probe", "a b", "c", cwd=probe, env=environment(MINE="own"))
    assert done.returncode == 7
    assert done.stdout == f"{probe} ['a b', 'c'] own True 1\nleft in order\n"
    assert done.stderr == "to errors\n"
    assert "MINE" not in os.environ


def test_an_error_ends_a_program_with_its_traceback(probe: Path) -> None:
    done = processes.run("probe", "breaks", cwd=probe)
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: broken\n")


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_a_signal_is_the_status_of_the_program_it_ends(name: str, probe: Path) -> None:
    process = _waiting(probe)
    assert process.poll() is None
    process.send_signal(signal.Signals[name])
    assert process.wait(30) == -signal.Signals[name]
    assert not psutil.pid_exists(process.pid)


def test_a_program_does_not_outlive_who_started_it(probe: Path) -> None:
    process = _waiting(probe)
    started = psutil.Process(process.pid)
    del process
    started.wait(30)


def test_the_server_has_one_thread(probe: Path) -> None:
    server = psutil.Process(_waiting(probe).pid).parent()
    assert server is not None
    assert "tests.fork_server" in server.cmdline()
    assert server.num_threads() == 1


def _waiting(probe: Path) -> Process:
    file = probe / "output.txt"
    with file.open("w") as stream:
        process = Process("probe", "waits", cwd=probe, output=stream)
    deadline = time.monotonic() + 60
    while "ready" not in file.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process
