"""Checkpoints on good and bad disks."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from dare_lightning.callbacks.rollout_checkpoint import RolloutCheckpoint, StraightToFile, newest_checkpoint
from tests.equalities.conftest import Offline, Online, weights


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk on which two checkpoints have room (those of `Offline` take about 270 kB), but not three."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a small disk can only be mounted by root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


class FullFrom(L.Callback):
    """From an optimiser step on, every save fails as on a full disk, behind half a file."""

    def __init__(self, step: int) -> None:
        self.step = step

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        step = self.step

        class Full(StraightToFile):
            def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
                if checkpoint["global_step"] >= step:
                    Path(path).write_bytes(b"half")
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                super().save_checkpoint(checkpoint, path, storage_options)

        trainer.strategy.checkpoint_io = Full()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_it_saves_the_start_every_so_many_steps_and_the_end(tmp_path: Path) -> None:
    Online().fit(RolloutCheckpoint(str(tmp_path / "c"), every_n_steps=3, keep=9))
    assert names(tmp_path / "c") == [f"step-{step:08d}.ckpt" for step in (0, 3, 4, 6, 8)]


@pytest.mark.parametrize(("keep", "kept"), [(1, [8]), (2, [7, 8]), (3, [6, 7, 8])])
def test_it_keeps_the_newest(tmp_path: Path, keep: int, kept: list[int]) -> None:
    saver = RolloutCheckpoint(str(tmp_path / "c"), every_n_steps=1, keep=keep)
    Offline().fit(saver)
    assert names(tmp_path / "c") == [f"step-{step:08d}.ckpt" for step in kept]
    assert saver.newest == newest_checkpoint(tmp_path / "c")


def test_the_last_step_is_saved_wherever_the_run_ends(tmp_path: Path) -> None:
    saver = RolloutCheckpoint(str(tmp_path / "c"), every_n_epochs=2)
    Online().fit(saver, max_steps=3)
    assert saver.newest == tmp_path / "c" / "step-00000003.ckpt"
    resumed, whole = Online(), Online()
    resumed.fit(ckpt_path=saver.newest)
    whole.fit()
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)


def test_a_full_disk_keeps_the_last_good_checkpoint_and_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver = RolloutCheckpoint(str(tmp_path / "c"), every_n_steps=1)
    run = Offline()
    with caplog.at_level(logging.ERROR):
        trainer = run.fit(saver, FullFrom(4))
    assert trainer.global_step == 8
    assert names(tmp_path / "c") == ["step-00000002.ckpt", "step-00000003.ckpt"]
    assert saver.failures == 6  # steps 4 to 7, and the last one at the end of its epoch and of the run
    assert "step-00000004.ckpt was not written" in caplog.text
    assert "No space left on device" in caplog.text
    assert "failure 6 of this run; the newest good one is" in caplog.text
    resumed = Offline()
    resumed.fit(ckpt_path=newest_checkpoint(tmp_path / "c"))
    torch.testing.assert_close(weights(resumed), weights(run), rtol=0, atol=0)


def test_a_disk_that_is_really_full_does_the_same(small_disk: Path) -> None:
    saver = RolloutCheckpoint(str(small_disk / "c"), every_n_steps=1, keep=5)
    trainer = Offline().fit(saver)
    assert trainer.global_step == 8
    assert names(small_disk / "c") == ["step-00000000.ckpt", "step-00000001.ckpt"]
    assert saver.failures == 8
    assert torch.load(newest_checkpoint(small_disk / "c"), weights_only=True)["global_step"] == 1


def test_a_required_checkpoint_stops_the_run(tmp_path: Path) -> None:
    saver = RolloutCheckpoint(str(tmp_path / "c"), every_n_steps=1, required=True)
    with pytest.raises(RuntimeError, match=r"cannot write the checkpoint .*step-00000002.ckpt: .*No space left"):
        Offline().fit(saver, FullFrom(2))
    assert names(tmp_path / "c") == ["step-00000000.ckpt", "step-00000001.ckpt"]


def test_a_folder_that_cannot_be_made_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        Offline().fit(RolloutCheckpoint(str(tmp_path / "file" / "c")))


def test_half_written_files_are_cleared_away(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "step-00000005.part").write_bytes(b"half")
    Offline().fit(RolloutCheckpoint(str(tmp_path / "c")))
    assert names(tmp_path / "c") == ["step-00000004.ckpt", "step-00000008.ckpt"]


def test_a_new_run_in_the_folder_of_another_is_not_resumed_from_its_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "c"
    Offline().fit(RolloutCheckpoint(str(folder)))
    Offline().fit(RolloutCheckpoint(str(folder), every_n_steps=1), max_steps=2)
    assert names(folder) == ["earlier-run-1", "step-00000001.ckpt", "step-00000002.ckpt"]
    assert names(folder / "earlier-run-1") == ["step-00000004.ckpt", "step-00000008.ckpt"]
    assert newest_checkpoint(folder).name == "step-00000002.ckpt"
    assert "held checkpoints of another run" in caplog.text


def test_a_run_that_went_back_overtakes_its_later_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    Offline().fit(RolloutCheckpoint(str(folder), every_n_steps=1, keep=9))
    Offline().fit(
        RolloutCheckpoint(str(folder), every_n_steps=1, keep=2), ckpt_path=folder / "step-00000003.ckpt", max_steps=5
    )
    assert names(folder) == ["step-00000004.ckpt", "step-00000005.ckpt"]
    assert newest_checkpoint(folder).name == "step-00000005.ckpt"


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    saver = RolloutCheckpoint(str(folder))
    Offline().fit(saver)
    content = (folder / "step-00000008.ckpt").read_bytes()
    (folder / "step-00000008.ckpt").write_bytes(content[: len(content) // 2])
    assert newest_checkpoint(folder).name == "step-00000004.ckpt"


def test_a_folder_without_checkpoints_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(FileNotFoundError, match=r"no checkpoint in .*; found \['notes.txt'\]"):
        newest_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["every_n_steps", "every_n_epochs", "keep"])
def test_settings_below_one_are_refused(name: str) -> None:
    settings: dict[str, Any] = {name: 0}
    with pytest.raises(ValueError, match=f"callbacks.checkpoint.{name}=0 must be at least 1"):
        RolloutCheckpoint("c", **settings)


def test_names_paste_into_a_command_line(tmp_path: Path) -> None:
    saver = RolloutCheckpoint(str(tmp_path / "c"))
    Offline().fit(saver)
    assert saver.newest is not None
    assert not set(saver.newest.name) & set("=,{}[]() '\"$*?")


def test_a_save_that_fails_leaves_an_older_checkpoint_of_the_same_step(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    Offline().fit(RolloutCheckpoint(str(folder), every_n_steps=1, keep=9))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    saver = RolloutCheckpoint(str(folder), every_n_steps=1, keep=9)
    Offline().fit(saver, FullFrom(7), ckpt_path=folder / "step-00000006.ckpt")
    assert saver.failures >= 2
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
