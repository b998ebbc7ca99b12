"""Sweeps: one bad job is visible and harmless."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from dare_lightning.cli.compose import expand_sweep
from dare_lightning.cli.errors import UserError
from tests.cli.conftest import Finished

Tiny = Callable[..., Finished]


def _sweep(tmp_path: Path) -> Path:
    (folder,) = (tmp_path / "runs" / "fit").iterdir()
    return folder


def _status(folder: Path) -> list[str]:
    jobs = sorted((p for p in folder.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
    return [json.loads((job / "status.json").read_text())["status"] for job in jobs]


def test_others_finish_failures_are_listed_last_and_can_be_rerun(tiny: Tiny, tmp_path: Path) -> None:
    result = tiny("--multirun", "seed=1,7,2")
    folder = _sweep(tmp_path)
    assert result.returncode == 1
    assert _status(folder) == ["failed", "finished", "failed"]
    end = result.stderr.splitlines()[-8:]
    assert "0  seed=1" in end[0]
    assert "loss is NaN at step 3" in end[1]
    assert "2  seed=2" in end[3]
    assert "the buffer is empty" in end[4]
    assert "ValueError: loss is NaN" in (folder / "0" / "job.log").read_text()
    assert "RuntimeError: the buffer is empty" in (folder / "2" / "job.log").read_text()

    (tmp_path / "mended").touch()
    words = shlex.split(end[-1])
    again = tiny(*words[words.index("fit") + 1 :])
    assert again.returncode == 0
    assert _status(folder) == ["finished"] * 3
    assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == ["0", "0.failed1", "1", "2", "2.failed1"]


def test_parallel_jobs_keep_their_output_apart(tiny: Tiny, tmp_path: Path) -> None:
    result = tiny("-m", "seed=7,1", "--jobs", "2")
    folder = _sweep(tmp_path)
    assert result.returncode == 1
    assert _status(folder) == ["finished", "failed"]
    assert (folder / "0" / "output.log").read_text() == "training with seed 7\n"


def test_a_killed_job_is_a_failed_one_and_a_flag_stops_there(tiny: Tiny, tmp_path: Path) -> None:
    result = tiny("-m", "seed=7,4,8", "--stop-on-failure")
    assert result.returncode == 1
    assert _status(_sweep(tmp_path)) == ["finished", "failed"]
    assert "killed by SIGKILL" in result.stderr
    assert "1 not started" in result.stderr


def test_every_kind_of_sweep_expands() -> None:
    jobs = expand_sweep(["seed=range(1,3)", "method=choice(sft,d1)", "run_root=x", "~debug"])
    assert len(jobs) == 4
    assert jobs[1] == ["seed=1", "method=d1", "run_root=x", "~debug"]
    with pytest.raises(UserError, match="optuna"):
        expand_sweep(["seed=interval(1,3)"])


@pytest.mark.slow
def test_launcher_plugins_of_hydra_run_the_jobs(tiny: Tiny, tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    result = tiny("-m", "hydra/launcher=joblib", "seed=7,1")
    assert result.returncode == 1
    assert _status(_sweep(tmp_path)) == ["finished", "failed"]
    assert "loss is NaN at step 3" in result.stderr


@pytest.mark.slow
def test_a_sweeper_plugin_reads_the_metric(tiny: Tiny, tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    words = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1", "optimized_metric=score"]
    result = tiny("-m", *words, "seed=choice(7,8)")
    assert result.returncode == 0, result.stderr
    assert _status(_sweep(tmp_path)) == ["finished", "finished"]
    assert (_sweep(tmp_path) / "optimization_results.yaml").exists()
