"""MLflow in a process of its own: it delays nothing, loses nothing and outlives nobody."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.shared import ROOT

JOB = """
import sys, psutil
from pathlib import Path
from dare_lightning.callbacks.tracking_process import ProcessRun, start_early
from dare_lightning.callbacks.tracking_store import StoreSettings, local_store
from dare_lightning.callbacks.tracking_writer import BackgroundWriter, Params, Point, Points, Status

uri, artifacts = local_store(Path(sys.argv[1]))
start_early(uri)
(early,) = psutil.Process().children()
run = ProcessRun(StoreSettings(uri, artifacts, "dare", sys.argv[2]), lambda: {"command": "fit"}, lambda run_id: None)
writer = BackgroundWriter(run)
writer.put(Params({"seed": 7}, "config.yaml"))
writer.put(Points((Point("loss", 1.0, 0, 1000),)))
assert writer.flush(120, 120)
(child,) = psutil.Process().children()
assert child == early
if sys.argv[2] == "waits":
    print(child.pid, flush=True)
    sys.stdin.read()
child.kill()
writer.put(Points((Point("loss", 2.0, 1, 2000),)))
writer.put(Status("FINISHED", 3000))
assert writer.flush(120, 120)
assert "mlflow" not in sys.modules, "the process that trains imported MLflow"
(child,) = psutil.Process().children()
print(child.pid)
run.stop()
assert not psutil.Process().children()
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for the whole file: creating a database takes seconds."""
    return tmp_path_factory.mktemp("work")


LOSSES = """
select step, value from metrics join runs on runs.run_uuid = metrics.run_uuid where runs.name = 'ends' order by step
"""


def _start(folder: Path, what: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", JOB, str(folder), what]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _ends(process: int) -> bool:
    deadline = time.monotonic() + 60
    while psutil.pid_exists(process) and psutil.Process(process).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.timeout(240)
def test_a_tracking_process_that_dies_is_replaced_and_loses_nothing(root: Path) -> None:
    job = _start(root, "ends")
    printed = job.communicate(timeout=200)[0]
    assert job.returncode == 0
    assert _ends(int(printed))
    store = sqlite3.connect(root / "mlflow.db")
    assert store.execute(LOSSES).fetchall() == [
        (0, 1.0),
        (1, 2.0),
    ]
    assert store.execute("select status from runs where name = 'ends'").fetchall() == [("FINISHED",)]
    assert store.execute("select value from params where key = 'seed'").fetchall() == [("7",)]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_killed_run_takes_its_tracking_process_along(root: Path) -> None:
    job = _start(root, "waits")
    assert job.stdout is not None
    child = int(job.stdout.readline())
    job.send_signal(signal.SIGKILL)
    job.wait()
    assert _ends(child)
