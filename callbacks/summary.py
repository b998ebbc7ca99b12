"""The end of a run: what was gained, where everything is, and what to try next."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L

from dare_lightning.callbacks.artifacts import log_figure, run_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVE = "curve.png"


class Summary(L.Callback):
    """Keeps the curve of the training and the held-out metric, draws it, and says what was gained.

    The history is part of the checkpoint, so a resumed run draws the whole curve. Its x is the number of epochs
    (online: rollouts) done; a validation before the first one counts as 0.

    Args:
        train_metrics: names to look for; the first that was logged is the training curve.
        held_out_metrics: the same for the held-out curve.
        model_dir: where the exported model will be; named in the summary if it is there.
        next_commands: commands to suggest.
        show: print when the fit ends; otherwise whoever owns the callback prints `text`.
    """

    def __init__(
        self,
        train_metrics: Sequence[str] = ("rollout/reward", "train/loss"),
        held_out_metrics: Sequence[str] = ("val/solve_rate", "val/reward", "val/loss"),
        model_dir: str | None = None,
        next_commands: Sequence[str] = (),
        show: bool = True,
    ) -> None:
        self.train_metrics = tuple(train_metrics)
        self.held_out_metrics = tuple(held_out_metrics)
        self.model_dir = model_dir
        self.next_commands = list(next_commands)
        self.show = show
        self.history: dict[str, dict[int, float]] = {}
        self._trainer: L.Trainer | None = None
        self._epoch_ended = False
        self._started = time.monotonic()

    def record(self, metric: str, done: int, value: float) -> None:
        """Put a value on the curve of `metric` after `done` epochs; a later value replaces an earlier one."""
        self.history.setdefault(metric, {})[done] = float(value)

    def curve(self, metrics: Sequence[str]) -> tuple[str, list[int], list[float]] | None:
        """Name, x and y of the first of these metrics that has values; None if none has."""
        for name in metrics:
            if points := self.history.get(name):
                done = sorted(points)
                return name, done, [points[x] for x in done]
        return None

    def gain(self) -> tuple[float, float] | None:
        """First and last held-out value; None with fewer than two."""
        curve = self.curve(self.held_out_metrics)
        return None if curve is None or len(curve[2]) < 2 else (curve[2][0], curve[2][-1])

    def text(self, trainer: L.Trainer) -> str:
        """The summary, several lines."""
        seconds = round(time.monotonic() - self._started)
        word = "rollouts" if "rollout/reward" in self.history else "epochs"
        lines = [
            f"Done: {trainer.current_epoch} {word}, {trainer.global_step} optimiser steps"
            f" ({seconds // 60} min {seconds % 60} s in this process)"
        ]
        for title, metrics in (("held out", self.held_out_metrics), ("training", self.train_metrics)):
            if (curve := self.curve(metrics)) is not None:
                lines.append(f"  {title:<9} {_described(*curve, word)}")
        folder = run_folder(trainer)
        lines.append(f"  {'run':<9} {folder}")
        if (folder / CURVE).is_file():
            lines.append(f"  {'curve':<9} {folder / CURVE}")
        if self.model_dir is not None and Path(self.model_dir).is_dir():
            lines.append(f"  {'model':<9} {self.model_dir}")
        if self.next_commands:
            lines += ["Next:", *(f"  {command}" for command in self.next_commands)]
        return "\n".join(lines)

    def draw(self) -> Figure | None:
        """The curves as a figure; None where nothing was recorded."""
        curves = [("training", self.curve(self.train_metrics)), ("held out", self.curve(self.held_out_metrics))]
        known = [(title, *curve) for title, curve in curves if curve is not None]
        if not known:
            return None
        # Not pyplot: it would look for a display, and keep every figure alive.
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 2.8 * len(known)), layout="constrained")
        for row, (title, name, done, values) in enumerate(known):
            axes = figure.add_subplot(len(known), 1, row + 1)
            axes.plot(done, values, marker="o", markersize=3, linewidth=1.2, color=f"C{row}")
            axes.set_title(f"{name} ({title})", fontsize=10)
            axes.set_xlabel("rollouts" if "rollout/reward" in self.history else "epochs")
            axes.grid(alpha=0.3)
        return figure

    def state_dict(self) -> dict[str, Any]:
        """The history so far."""
        if self._trainer is not None and self._epoch_ended:
            self._collect(self.train_metrics, self._trainer, self._trainer.current_epoch + 1)
        return {"history": {name: dict(points) for name, points in self.history.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the history of the run that is resumed."""
        self.history = {name: dict(points) for name, points in state_dict["history"].items()}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Remember whose metrics to read."""
        self._trainer = trainer
        self._epoch_ended = False
        self._started = time.monotonic()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Read what callbacks after this one logged at the end of the epoch before."""
        if self._epoch_ended:
            self._collect(self.train_metrics, trainer, trainer.current_epoch)
        self._epoch_ended = False

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Read what was logged so far; what later callbacks log is read at the next chance."""
        self._epoch_ended = True
        self._collect(self.train_metrics, trainer, trainer.current_epoch + 1)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Read the held-out metrics."""
        if not trainer.sanity_checking:
            # Inside fit, the epoch that is being validated has not been counted yet; `validate` alone is the start.
            done = trainer.current_epoch + 1 if trainer.state.fn == "fit" else trainer.current_epoch
            self._collect(self.held_out_metrics, trainer, done)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Read the last epoch's metrics and draw the curve."""
        if self._epoch_ended:
            self._collect(self.train_metrics, trainer, trainer.current_epoch)
        if trainer.is_global_zero and (figure := self.draw()) is not None:
            log_figure(trainer, figure, CURVE)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the summary."""
        if self.show and trainer.is_global_zero:
            print(self.text(trainer), flush=True)

    def _collect(self, metrics: Sequence[str], trainer: L.Trainer, done: int) -> None:
        known = trainer.callback_metrics
        for name in metrics:
            if name in known:
                self.record(name, done, float(known[name]))


def _described(name: str, done: Sequence[int], values: Sequence[float], word: str) -> str:
    if len(values) == 1:
        return f"{name} {values[0]:.4g} (after {done[0]} {word})"
    change = values[-1] - values[0]
    return f"{name} {values[0]:.4g} -> {values[-1]:.4g} ({change:+.4g}, after {done[0]} -> {done[-1]} {word})"
