"""What a run leaves behind, however it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

from dare_lightning.cli.run_folder import new_folder
from tests.cli.conftest import Finished

Tiny = Callable[..., Finished]


def _run(tmp_path: Path) -> Path:
    (folder,) = (tmp_path / "runs" / "fit").iterdir()
    return folder


def test_a_run_saves_its_configuration_and_its_log(tiny: Tiny, tmp_path: Path) -> None:
    result = tiny("seed=7")
    folder = _run(tmp_path)
    assert result.returncode == 0
    cfg = yaml.safe_load((folder / "config.yaml").read_text())
    assert cfg["seed"] == 7
    assert cfg["callbacks"]["checkpoint"]["folder"].endswith(f"{folder.name}/checkpoints")
    assert "seed=7\n" in (folder / "overrides.txt").read_text()
    assert "training with seed 7" in (folder / "job.log").read_text()
    assert json.loads((folder / "status.json").read_text())["status"] == "finished"


def test_a_second_run_in_a_folder_keeps_the_first_ones_configuration(tiny: Tiny, tmp_path: Path) -> None:
    for seed in (7, 8, 9):
        assert tiny(f"seed={seed}", "run_dir=here").returncode == 0
    seeds = [yaml.safe_load((tmp_path / "here" / f"config{n}.yaml").read_text())["seed"] for n in (".1", ".2", "")]
    assert seeds == [7, 8, 9]
    assert "seed=7\n" in (tmp_path / "here" / "overrides.1.txt").read_text()
    assert json.loads((tmp_path / "here" / "composed.1.json").read_text())["config"]["seed"] == 7


def test_a_failed_run_shows_one_line_and_logs_the_traceback(tiny: Tiny, tmp_path: Path) -> None:
    result = tiny("seed=1")
    folder = _run(tmp_path)
    assert result.returncode == 1
    assert "error: loss is NaN at step 3" in result.stderr
    assert "Traceback" not in result.stderr
    log = (folder / "job.log").read_text()
    assert "Traceback" in log
    assert "ValueError: loss is NaN at step 3" in log
    assert json.loads((folder / "status.json").read_text())["status"] == "failed"


def test_a_mistake_found_while_building_leaves_no_folder(tiny: Tiny, tmp_path: Path) -> None:
    result = tiny("seed=5")
    assert result.returncode == 2
    assert result.stderr.splitlines() == ["training with seed 5", "error: data: the sizes do not divide"]
    assert not (tmp_path / "runs").exists()
    assert tiny("seed=5", "run_dir=asked").returncode == 2
    assert "the sizes do not divide" in (tmp_path / "asked" / "job.log").read_text()


def test_parts_that_do_not_fit_leave_no_folder_either(dare: Tiny, tmp_path: Path) -> None:
    result = dare("fit", "data.micro_batch=5", "logger=none", "trainer=cpu")
    assert result.returncode == 2
    assert "not a multiple of data.micro_batch=5" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_used_again_is_said_aloud(tiny: Tiny, tmp_path: Path) -> None:
    assert "warning" not in tiny("seed=7", "run_dir=here").stderr
    assert "warning: run_dir=here holds an earlier run" in tiny("seed=8", "run_dir=here").stderr
    (tmp_path / "here" / "checkpoints").mkdir()
    (tmp_path / "here" / "checkpoints" / "step-00000001.ckpt").touch()
    (line,) = [line for line in tiny("seed=9", "run_dir=here").stderr.splitlines() if "warning" in line]
    assert line.endswith("to go on with that one, add ckpt_path=here/checkpoints")
    assert "warning" not in tiny("seed=9", "run_dir=here", "ckpt_path=here/checkpoints").stderr


def test_an_unforeseen_error_names_its_kind(tiny: Tiny) -> None:
    assert "error: RuntimeError: the buffer is empty" in tiny("seed=2").stderr


def test_ctrl_c_ends_with_130_and_a_short_line(tiny: Tiny) -> None:
    result = tiny("seed=3")
    assert result.returncode == 130
    assert "interrupted" in result.stderr
    assert "Traceback" not in result.stderr


def test_folders_made_in_the_same_second_differ(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: new_folder(tmp_path, "fit"), range(16)))
    assert len(set(folders)) == 16
    assert all("=" not in folder.name for folder in folders)
