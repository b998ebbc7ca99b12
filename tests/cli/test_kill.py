"""Runs that are stopped, in every way there is, and gone on with as the program says.

`DARE_KILLS=20` kills that many more runs at random moments.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dare_lightning.callbacks.rollout_checkpoint import newest_checkpoint
from dare_lightning.cli import app
from tests import processes
from tests.processes import Finished, Process

# Each process takes seconds on an idle machine, minutes on a busy one.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FIT = [
    *("model=new_tiny_llada", "model.layers=1", "model.width=16", "model.heads=2", "trainer=cpu", "logger=none"),
    *("callbacks.checkpoint.every_n_steps=1", "data.reward._target_=tests.cli.variety.Variety", "method.kl_coef=0.01"),
    *("data.train_prompts=16", "data.val_prompts=4", "data.group_size=4", "data.prompts_per_rollout=4"),
    *("data.updates_per_rollout=2", "data.inner_epochs=2", "data.micro_batch=4", "trainer.check_val_every_n_epoch=1"),
    *("trainer.max_epochs=6",),
]
STEPS = 24
_started: list[Process] = []
PROGRAM = "python -m dare_lightning fit "


def _start(folder: Path, *words: str, output: str = "output.txt") -> Process:
    with (folder / output).open("w") as stream:
        process = Process("dare_lightning", "fit", *words, cwd=folder, output=stream)
    _started.append(process)
    return process


def _command(folder: Path) -> str:
    """The command that goes on with the run, as it was printed."""
    lines = (folder / "output.txt").read_text().splitlines()
    (line,) = [line.strip() for line in lines if line.strip().startswith(PROGRAM) and "ckpt_path=" in line]
    return line


def _printed(folder: Path) -> list[str]:
    """What follows `fit` in that command."""
    return shlex.split(_command(folder))[4:]


def _go_on(folder: Path) -> Finished:
    return processes.run("dare_lightning", "fit", *_printed(folder), cwd=folder)


def _paste(folder: Path) -> Finished:
    """Go on as a person does: the printed line in a shell, and a new interpreter."""
    line = _command(folder).replace("python ", f"exec {sys.executable} ", 1)
    environment = processes.environment()
    return subprocess.run(line, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


def _wait_for(condition: Callable[[], bool], process: Process) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert process.poll() is None, "the run ended before the moment it was to be stopped at"
        assert time.monotonic() < deadline
        time.sleep(0.002)


def _saved(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-*.ckpt"))


def _assert_equal(run: Path, whole: Path) -> None:
    torch.testing.assert_close(
        load_file(run / "model" / "model.safetensors"), load_file(whole / "model" / "model.safetensors"), rtol=0, atol=0
    )
    assert _saved(run)[-1].name == f"step-{STEPS:08d}.ckpt"


@pytest.fixture(scope="module", autouse=True)
def _nothing_goes_on() -> Iterator[None]:
    """A run that a failed test left behind ends with the tests."""
    yield
    for process in _started:
        process.kill()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody stopped, in its folder."""
    folder = tmp_path_factory.mktemp("whole")
    process = _start(folder, *FIT, "run_dir=whole")
    try:
        status: int | str = process.wait()
    except subprocess.TimeoutExpired:
        status = "still running after 240 s"
    assert status == 0, (folder / "output.txt").read_text()
    return folder / "whole"


def _step(number: int) -> Callable[[Path], bool]:
    return lambda run: any(int(path.stem.split("-")[1]) >= number for path in _saved(run))


def _in_the_middle_of_saving(run: Path) -> bool:
    return _step(6)(run) and any((run / "checkpoints").glob("*.part"))


def test_a_run_killed_twice_goes_on_to_the_same_weights(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "killed=run 1"
    process = _start(tmp_path, *FIT, "run_dir=killed=run 1")
    _wait_for(lambda: _in_the_middle_of_saving(run), process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    # As a kill while saving leaves it, wherever this one came.
    (run / "checkpoints" / "step-00000099.part").write_bytes(b"half")
    again = _start(tmp_path, *_printed(tmp_path), output="again.txt")
    _wait_for(lambda: _step(16)(run), again)  # the end of a rollout: validation is over, the next rollout begins
    again.kill()
    assert again.wait() == -signal.SIGKILL
    resumed = _paste(tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    _assert_equal(run, whole)
    assert not list((run / "checkpoints").glob("*.part"))


@pytest.mark.parametrize("number", range(int(os.environ.get("DARE_KILLS", "0"))))
def test_a_run_killed_again_and_again_goes_on_to_the_same_weights(number: int, whole: Path, tmp_path: Path) -> None:
    draw = random.Random(number)
    process = _start(tmp_path, *FIT, "run_dir=killed")
    _wait_for(lambda: "ckpt_path=" in (tmp_path / "output.txt").read_text(), process)
    time.sleep(draw.uniform(0, 3))
    process.kill()
    process.wait()
    log = tmp_path / "again.txt"
    again = _start(tmp_path, *_printed(tmp_path), output=log.name)
    if number % 2:  # while it trains, however long this machine takes to get there
        while again.poll() is None and "ckpt_path=" not in log.read_text():
            time.sleep(0.05)
        time.sleep(draw.uniform(0, 3))
    else:  # wherever it is, which may be in the middle of reading the checkpoint
        time.sleep(draw.uniform(0.5, 4))
    again.kill()
    again.wait()
    resumed = _go_on(tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    _assert_equal(tmp_path / "killed", whole)


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_ends_the_run_with_its_status_and_a_good_checkpoint(name: str, status: int, tmp_path: Path) -> None:
    process = _start(tmp_path, *FIT, "run_dir=stopped", "trainer.max_epochs=1000")
    _wait_for(lambda: _step(2)(tmp_path / "stopped"), process)
    process.send_signal(signal.Signals[name])
    assert process.wait() == status
    assert json.loads((tmp_path / "stopped" / "status.json").read_text())["status"] == "interrupted"
    assert torch.load(newest_checkpoint(tmp_path / "stopped" / "checkpoints"), weights_only=True)["global_step"] >= 2


def test_going_on_with_a_finished_run_changes_nothing(whole: Path) -> None:
    before = {path: path.read_bytes() for path in (whole / "model").iterdir()}
    result, saved = (whole / "result.json").read_text(), _saved(whole)
    again = _go_on(whole.parent)
    assert again.returncode == 0, again.stderr
    assert "nothing is left to train" in again.stderr
    assert {path: path.read_bytes() for path in before} == before
    assert (whole / "result.json").read_text() == result
    assert _saved(whole) == saved
    assert re.search(r"generate ckpt_path=\S+step-00000024.ckpt", again.stdout)


@pytest.mark.parametrize("path", ["none.ckpt", "empty"])
def test_a_missing_checkpoint_is_an_error(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DARE_RUN_DIR", raising=False)
    Path("empty/checkpoints").mkdir(parents=True)
    assert app.main(["fit", *FIT, "run_dir=fresh", f"ckpt_path={path}"]) in (1, 2)
    assert path in capsys.readouterr().err
    assert not _saved(Path("fresh"))


def test_the_printed_command_finds_added_configuration_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DARE_RUN_DIR", raising=False)
    Path("my conf/reward").mkdir(parents=True)
    Path("my conf/reward/variety.yaml").write_text("_target_: tests.cli.variety.Variety\n")
    words = [word for word in FIT if "Variety" not in word]
    added = ["--config-dir", "my conf", "reward@data.reward=variety", "trainer.max_epochs=1", "run_dir=one"]
    assert app.main(["fit", *words, *added]) == 0
    printed = next(line for line in capsys.readouterr().err.splitlines() if line.strip().startswith(PROGRAM))
    assert app.main(shlex.split(printed)[3:]) == 0
    assert "nothing is left to train" in capsys.readouterr().err
