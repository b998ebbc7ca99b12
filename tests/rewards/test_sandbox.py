"""What no generated program can do, how long a batch may take, and what is left behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from dare_lightning.rewards.code import CodeReward
from dare_lightning.rewards.sandbox import filters, jail
from dare_lightning.rewards.sandbox.client import SandboxError
from tests.rewards.cases import example
from tests.rewards.hostile import CHEATS, EARNED, aimed
from tests.rewards.programs import TEST, make, statuses
from tests.rewards.runaways import RUNAWAYS
from tests.shared import ROOT

LIMIT = 1.0


@pytest.fixture(scope="module", params=["bubblewrap", "namespaces", "filters"])
def level(request: pytest.FixtureRequest) -> Iterator[CodeReward]:
    """Each level that works on this machine."""
    with make(request.param, timeout_s=LIMIT) as reward:
        try:
            reward.protection  # noqa: B018 (starting is the trial)
        except SandboxError as error:
            if request.param == "filters" and filters.supported():
                raise
            pytest.skip(str(error))
        yield reward


@pytest.fixture(scope="module")
def reward() -> Iterator[CodeReward]:
    with make() as reward:
        yield reward


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Files that every user may write or read, servers of three kinds, and a token in the environment."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o777)
    canary, secret = tmp_path / "canary.txt", tmp_path / "secret.txt"
    for file in (canary, secret):
        file.write_text("alive")
        file.chmod(0o666)
    os.environ["TOKEN"] = "hunter2"
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        targets = {"canary": str(canary), "secret": str(secret), "port": server.getsockname()[1]}
        names = {"socket": str(tmp_path / "socket"), "abstract": f"\0{tmp_path}"}
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one, socket.socket(socket.AF_UNIX, one.type) as two:
            for listener, name in zip((one, two), names.values(), strict=True):
                listener.bind(name)
                listener.setblocking(False)
            os.chmod(names["socket"], 0o666)
            yield {**targets, **names, "listeners": (one, two)}
    del os.environ["TOKEN"]


def with_honest_ones(programs: dict[str, str], outside: dict[str, Any]) -> list[str]:
    """Each followed by a right program, so that what one does to another shows."""
    pairs = [(aimed(text, outside), f"{EARNED}# {name}") for name, text in programs.items()]
    return [text for pair in pairs for text in pair]


def test_cheats_score_nothing_and_harm_nobody(level: CodeReward, outside: dict[str, Any]) -> None:
    before = os.stat(outside["canary"])
    found = statuses(level, with_honest_ones(CHEATS, outside))
    assert [name for name, status in zip(CHEATS, found[::2], strict=True) if status == "right"] == []
    assert [name for name, status in zip(CHEATS, found[1::2], strict=True) if status != "right"] == []
    after = os.stat(outside["canary"])
    assert Path(outside["canary"]).read_text() == "alive"
    assert (after.st_mode, after.st_mtime_ns, after.st_nlink) == (before.st_mode, before.st_mtime_ns, 1)
    assert os.listxattr(outside["canary"]) == []
    for listener in outside["listeners"]:
        with pytest.raises(BlockingIOError):
            listener.recv(1)


def test_runaways_are_cut_off_within_the_batchs_bound(level: CodeReward, outside: dict[str, Any]) -> None:
    statuses(level, [EARNED])
    programs = with_honest_ones(RUNAWAYS, outside)
    started = time.monotonic()
    found = statuses(level, programs)
    rounds = -(-len(RUNAWAYS) // level.sandbox.workers)
    assert time.monotonic() - started < (3 + rounds) * LIMIT + 10.0
    assert [name for name, s in zip(RUNAWAYS, found[::2], strict=True) if s not in ("timeout", "wrong")] == []
    assert [name for name, s in zip(RUNAWAYS, found[1::2], strict=True) if s != "right"] == []
    assert found[0] == found[2] == "timeout"
    assert len(psutil.Process(level.sandbox.pid).children(recursive=True)) == 1  # the zygote
    orphans = [p for p in psutil.process_iter(["ppid", "cmdline"]) if p.info["ppid"] == 1]
    assert [p for p in orphans if "rewards.sandbox" in " ".join(p.info["cmdline"] or [])] == []


def test_the_bare_level_says_what_it_does_not_contain() -> None:
    with make("limits") as reward:
        try:
            protection = reward.protection
        except SandboxError as error:
            pytest.skip(str(error))  # a root whose Python is private cannot give programs another user
    assert protection.holds["memory"]
    assert not protection.holds["network"]
    assert "NOT contained: network" in str(protection)


def test_a_level_that_does_not_work_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with make("bubblewrap") as reward, pytest.raises(SandboxError, match="protection=bubblewrap does not work here"):
        reward([EARNED], [example(TEST)])


@pytest.mark.skipif(not filters.supported(), reason="this kernel has neither seccomp nor Landlock for programs")
def test_where_the_kernel_can_everything_is_contained() -> None:
    with make() as reward:
        assert all(reward.protection.holds.values()), str(reward.protection)


def test_the_active_protection_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), make() as reward:
        protection = reward.protection
    assert protection.level in jail.LEVELS
    assert f"generated programs run in {protection.level}" in caplog.text


# Any thread, any process, nothing left.


def earned(reward: CodeReward) -> str:
    return statuses(reward, [EARNED])[0]


def earned_in_a_process(queue: Any, reward: CodeReward) -> None:
    queue.put(earned(reward))
    reward.close()


def test_the_main_thread_a_thread_and_a_daemonic_process_agree(reward: CodeReward) -> None:
    assert earned(reward) == "right"
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(earned, [reward] * 3)) == ["right"] * 3
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=earned_in_a_process, args=(queue, reward), daemon=True)
    process.start()
    assert queue.get(timeout=60) == "right"
    process.join(10)
    assert earned(reward) == "right"


def test_results_do_not_depend_on_chance(reward: CodeReward) -> None:
    program = "import random\ndef f():\n    return [random.random(), list({'a', 'b', 'c', 'd'}), hash('x')]"
    seen = json.dumps(["assert len(repr(f())) > 0", "import random; random.seed(0); assert f()[0] != 0"])
    assert statuses(reward, [program], seen) == ["right"]
    fixed = json.dumps([f"assert f()[0] == {__import__('random').Random(0).random()!r}"])
    assert statuses(reward, [program] * 2, fixed) == ["right"] * 2


def test_a_worker_that_dies_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with make() as reward:
        earned(reward)
        assert reward.sandbox.pid is not None
        os.kill(reward.sandbox.pid, signal.SIGKILL)
        assert earned(reward) == "right"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "ending", ["", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"], ids=["exit", "killed"]
)
def test_nothing_is_left_when_the_caller_ends(ending: str, tmp_path: Path) -> None:
    script = f"""
import psutil, threading, time
from dare_lightning.rewards.base import Example
from dare_lightning.rewards.code import CodeReward
reward = CodeReward(timeout_s=60)
tests = Example([], '["assert f(2) == 4"]')
assert reward(["def f(x):\\n    return 4"], [tests])[0].status == "right"
busy = lambda: reward(["import os, time\\ndef f(x):\\n    os.fork() or os.setsid(); time.sleep(1000)"], [tests])
threading.Thread(target=busy, daemon=True).start()
time.sleep(1)
print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
{ending}
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True, timeout=120, check=False
    )
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) >= 4
    deadline = time.monotonic() + 15
    while (any(map(psutil.pid_exists, pids)) or any(tmp_path.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, pids))
    assert list(tmp_path.iterdir()) == []


def test_an_empty_batch_starts_nothing() -> None:
    reward = CodeReward()
    assert reward([], []) == []
    assert reward.sandbox.pid is None


def test_a_pickled_reward_keeps_its_settings() -> None:
    copy = pickle.loads(pickle.dumps(CodeReward(0.7, 100, 3, value=2.0)))
    assert (copy.sandbox.limits.timeout_s, copy.sandbox.limits.memory, copy.sandbox.workers) == (0.7, 100 << 20, 3)
    assert copy.value == 2.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"timeout_s": 0}, "positive"), ({"workers": 0}, "positive"), ({"protection": "hope"}, "choose one of auto")],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CodeReward(**settings)
