"""What a run shows while it works: bars on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from dare_lightning.callbacks.rollout import RolloutCallback
from dare_lightning.generation import base as generation
from dare_lightning.replay.batch import SequenceBatch

SHOWN = {
    "loss": "train/loss",
    "reward": "rollout/reward",
    "held-out solve rate": "val/solve_rate",
    "held-out loss": "val/loss",
}


class Progress(L.Callback):
    """Epochs (online: rollouts), denoising steps, optimiser steps, tokens/s and the metrics that matter.

    Metrics are read at most every `refresh_seconds`, because reading one waits for the GPU.

    Args:
        refresh_seconds: time between updates of the bars.
        line_seconds: least time between lines where the output is no terminal; the first and the last always come.
        metrics: what to show: label -> logged metric; None shows loss, reward and the held-out results.
        console: where to; None takes the standard output.
    """

    def __init__(
        self,
        refresh_seconds: float = 0.5,
        line_seconds: float = 10.0,
        metrics: Mapping[str, str] | None = None,
        console: Console | None = None,
    ) -> None:
        self.refresh_seconds = refresh_seconds
        self.line_seconds = line_seconds
        self.metrics = dict(SHOWN if metrics is None else metrics)
        self.console = console
        self._bars: Bars | None = None
        self._tasks: dict[str, TaskID] = {}
        self._shows = False
        self._word = "epoch"
        self._started = time.monotonic()
        self._last_refresh = -float("inf")
        self._last_line = -float("inf")
        self._said = ""
        self._tokens = torch.zeros((), dtype=torch.int64)
        self._training_seconds = 0.0
        self._batch_started = time.monotonic()

    def rollout_progress(self, stage: str) -> generation.Progress:
        """What a generation backend reports its denoising steps to; `stage` is what it generates for."""

        def report(done: int, total: int) -> None:
            self._bar(f"{stage} (denoising steps)", done, total, visible=done < total)
            if done < total and time.monotonic() - self._last_line >= self.line_seconds:
                self._print(f"{stage}: denoising step {done} of {total}")

        return report

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """See what kind of run this is."""
        self._shows = trainer.is_global_zero
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        self._word = "rollout" if any(isinstance(callback, RolloutCallback) for callback in callbacks) else "epoch"
        if self.console is None:
            self.console = Console(file=sys.stdout)
        self._started = time.monotonic()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show the bars."""
        self._open()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show the bars where validation runs alone, or say that it runs: a large policy takes minutes."""
        self._open()
        if trainer.state.fn != "fit":
            self._print("evaluation: scoring")

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock of tokens/s: training alone, without generation."""
        self._batch_started = time.monotonic()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count, and move the bar now and then."""
        now = time.monotonic()
        self._training_seconds += now - self._batch_started
        if isinstance(batch, SequenceBatch):
            # Stays on the device until it is shown.
            self._tokens = self._tokens.to(batch.ids.device) + batch.attention_mask.sum()
        total = trainer.num_training_batches
        last = batch_idx + 1 == total
        first = self._said == ""
        if first or last or now - self._last_refresh >= self.refresh_seconds:
            self._bar(self._label(trainer), batch_idx + 1, None if total == float("inf") else int(total), key="train")
            self._say(trainer, always=first)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say where the run stands."""
        self._say(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say how it ended, and leave the terminal as it was."""
        self._say(trainer, always=True, ended=True)
        self._close()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the bars away where validation ran alone."""
        if trainer.state.fn != "fit":
            self._say(trainer, always=True)
            self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leave the terminal as it was, so that the error can be read."""
        self._close()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Leave the terminal as it was."""
        self._close()

    def _open(self) -> None:
        if self._bars is not None or not self._shows or self.console is None or not self.console.is_terminal:
            return
        self._tasks = {}
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}"),
            console=self.console,
            refresh_per_second=1 / self.refresh_seconds,
            transient=True,
        )
        self._bars.start()

    def _close(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def _bar(self, label: str, done: int, total: int | None, key: str | None = None, visible: bool = True) -> None:
        if self._bars is None:
            return
        key = key or label
        if key not in self._tasks:
            self._tasks[key] = self._bars.add_task(label, total=total, text="")
        self._bars.update(self._tasks[key], description=label, completed=done, total=total, visible=visible)

    def _label(self, trainer: L.Trainer, ended: bool = False) -> str:
        if trainer.state.fn != "fit":
            return "evaluation:"
        of = "" if trainer.max_epochs in (None, -1) else f"/{trainer.max_epochs}"
        # The epochs that have ended are counted already at the end of training.
        return f"{self._word} {trainer.current_epoch + (not ended)}{of}"

    def _say(self, trainer: L.Trainer, always: bool = False, ended: bool = False) -> None:
        """Refresh the bar's text, or print a line if one is due."""
        now = time.monotonic()
        due = self._bars is not None or now - self._last_line >= self.line_seconds
        if not self._shows or self.console is None or not (due or always):
            return
        self._last_refresh = now
        text = self._status(trainer)
        if self._bars is not None and "train" in self._tasks:
            self._bars.update(self._tasks["train"], text=text)
        elif text != self._said:
            self._print(f"{self._label(trainer, ended)} {text}")
        self._said = text

    def _print(self, text: str) -> None:
        """A line, where there are no bars to show it."""
        if not self._shows or self.console is None or self._bars is not None:
            return
        self._last_line = time.monotonic()
        seconds = round(self._last_line - self._started)
        line = f"[{seconds // 60}:{seconds % 60:02d}] {text}"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _status(self, trainer: L.Trainer) -> str:
        parts = [f"step {trainer.global_step}"]
        known = trainer.callback_metrics
        parts += [f"{label} {float(known[name]):.3g}" for label, name in self.metrics.items() if name in known]
        if self._training_seconds > 0 and (tokens := int(self._tokens)) > 0:
            parts.append(f"{tokens / self._training_seconds:,.0f} tokens/s")
            self._tokens = torch.zeros_like(self._tokens)
            self._training_seconds = 0.0
        return ", ".join(parts)
