"""What a run shows on a terminal and elsewhere."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rich.console import Console

from dare_lightning.callbacks.progress import Progress
from dare_lightning.replay.batch import SequenceBatch
from tests.callbacks.toy import Toy, loader, trainer


class Reward(L.Callback):
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.log("rollout/reward", 0.5)


def shown(folder: Path, terminal: bool, model: L.LightningModule | None = None, **settings: Any) -> str:
    output = io.StringIO()
    progress = Progress(console=Console(file=output, force_terminal=terminal, width=160), **settings)
    trainer(folder, callbacks=[Reward(), progress]).fit(model or Toy(), loader(), loader())
    return output.getvalue()


def test_without_a_terminal_lines_are_plain_and_few(tmp_path: Path) -> None:
    lines = shown(tmp_path, terminal=False).splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"\[\d+:\d\d\] epoch 1/2 step 1, loss [\d.e-]+", lines[0])
    assert re.fullmatch(r"\[\d+:\d\d\] epoch 2/2 step 8, loss .*, reward 0.5, held-out solve rate 0.2", lines[1])


def test_without_a_terminal_lines_come_as_often_as_asked(tmp_path: Path) -> None:
    lines = shown(tmp_path, terminal=False, line_seconds=0, refresh_seconds=0).splitlines()
    assert len(lines) >= 8


def test_a_terminal_gets_bars_and_is_left_clean(tmp_path: Path) -> None:
    output = shown(tmp_path, terminal=True)
    assert "\x1b[" in output
    assert "epoch 2/2" in output
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1


def test_an_error_leaves_the_terminal_clean(tmp_path: Path) -> None:
    def fail(step: int) -> None:
        raise ValueError("broken")

    output = io.StringIO()
    progress = Progress(console=Console(file=output, force_terminal=True))
    with pytest.raises(ValueError, match="broken"):
        trainer(tmp_path, callbacks=[progress]).fit(Toy(fail), loader())
    assert output.getvalue().count("\x1b[?25l") == output.getvalue().count("\x1b[?25h") == 1


def test_denoising_steps_have_their_own_bar(tmp_path: Path) -> None:
    output = io.StringIO()
    progress = Progress(refresh_seconds=0.01, console=Console(file=output, force_terminal=True, width=160))

    class Denoise(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            report = progress.rollout_progress("rollout")
            for done in range(1, 5):
                report(done, 4)
                time.sleep(0.05)

    trainer(tmp_path, callbacks=[progress, Denoise()], max_epochs=1).fit(Toy(), loader())
    assert re.search(r"rollout \(denoising steps\).*3/4", output.getvalue())


def test_reports_before_the_run_and_from_other_ranks_are_ignored() -> None:
    Progress().rollout_progress("denoising")(1, 2)


def test_tokens_of_sequence_batches_are_counted(tmp_path: Path) -> None:
    class Sequences(Toy):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            mask = torch.ones(2, 3, dtype=torch.bool)
            seeds = torch.zeros(2, dtype=torch.int64)
            return SequenceBatch(mask.long(), mask, mask, mask, seeds, seeds)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step([batch.ids.float()], batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            return None

    assert re.search(r"step 8.* [\d,]+ tokens/s", shown(tmp_path, terminal=False, model=Sequences()))


def test_a_validation_alone_says_that_it_runs_and_how_far_it_is(tmp_path: Path) -> None:
    output = io.StringIO()
    progress = Progress(line_seconds=0.03, console=Console(file=output, width=160))

    class Denoise(L.Callback):
        def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            said = output.getvalue()
            assert re.fullmatch(r"\[\d+:\d\d\] evaluation: scoring\n", said), said
            report = progress.rollout_progress("held-out")
            report(1, 4)  # too soon for a line
            time.sleep(0.05)
            report(2, 4)
            report(4, 4)

    trainer(tmp_path, callbacks=[progress, Denoise()]).validate(Toy(), loader(), verbose=False)
    lines = output.getvalue().splitlines()
    assert [line.partition("] ")[2] for line in lines[1:-1]] == ["held-out: denoising step 2 of 4"]
    assert "evaluation: step 0" in lines[-1]
