"""The command `fit`."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig

from dare_lightning.callbacks.opencompass import OpenCompassEval
from dare_lightning.callbacks.rollout_checkpoint import RolloutCheckpoint, newest_checkpoint
from dare_lightning.callbacks.summary import Summary
from dare_lightning.callbacks.tracking import MLflowLogger
from dare_lightning.cli.benchmarks import as_written, failed_benchmarks
from dare_lightning.cli.build import Objects, build
from dare_lightning.cli.console import say
from dare_lightning.cli.errors import before_the_start
from dare_lightning.cli.run_folder import TERMINATED
from dare_lightning.datamodules.prompts import PromptDataModule
from dare_lightning.export import export_policy
from dare_lightning.families.adapters import has_adapter
from dare_lightning.families.flex import FORWARD_ONLY
from dare_lightning.methods.plans import check_accumulation

log = logging.getLogger(__name__)


def run(cfg: DictConfig, run_dir: Path) -> int:
    """Train, validate, export; returns the exit status.

    Raises:
        UserError: the parts do not fit each other; nothing was started.
        SystemExit: asked to terminate (SIGTERM), with status 143.
        KeyboardInterrupt: interrupted.
    """
    # Checkpoints hold tensors, numbers and strings only, so that reading one cannot run code.
    resume = resume_path(cfg)
    with before_the_start():
        objects = build(cfg, run_dir)
        _check_training(objects)
    summary = next((c for c in _callbacks(objects.trainer) if isinstance(c, Summary)), None)
    if summary is not None:
        summary.show = False
    start = _Start(run_dir, list(_typed(run_dir)))
    _callbacks(objects.trainer).insert(0, start)
    with _termination(objects.trainer):
        if resume is None and cfg.get("validate_first", True):
            objects.trainer.validate(objects.method, datamodule=objects.data, verbose=False)
    with _termination(objects.trainer):
        objects.trainer.fit(objects.method, datamodule=objects.data, ckpt_path=resume, weights_only=True)
    if objects.trainer.interrupted:
        raise KeyboardInterrupt
    if not start.seen:
        # Resumed behind the last step: what the finished run measured last is measured again.
        say(f"nothing is left to train: the run is at its end, step {objects.trainer.global_step}")
        objects.trainer.validate(objects.method, datamodule=objects.data, verbose=False)
    if objects.trainer.is_global_zero:
        _finish(cfg, run_dir, objects, summary, keep=not start.seen)
    return 0


def _check_training(objects: Objects) -> None:
    """Refuse what training would, before a validation that comes first."""
    if objects.policy.attention == "flex" and isinstance(objects.trainer.accelerator, CPUAccelerator):
        raise ValueError(f"model.{FORWARD_ONLY}")
    if objects.method.gradient_plan == "accumulate":
        check_accumulation(objects.trainer)
    for callback in _callbacks(objects.trainer):
        if isinstance(callback, OpenCompassEval):
            callback.check_monitors(objects.trainer)


@contextmanager
def _termination(trainer: L.Trainer) -> Iterator[None]:
    """Lightning waits for a good moment after SIGTERM; it must neither count as success nor be forgotten."""
    try:
        yield
    except SIGTERMException as error:
        raise SystemExit(TERMINATED) from error
    if trainer.received_sigterm:
        raise SystemExit(TERMINATED)


def resume_path(cfg: DictConfig) -> str | None:
    """The checkpoint to go on from: `ckpt_path`, or the newest one where it names a run's folder."""
    if cfg.ckpt_path is None:
        return None
    path = Path(cfg.ckpt_path)
    if path.is_dir():
        inside = path / "checkpoints"
        path = newest_checkpoint(inside if inside.is_dir() else path)
    log.info("resuming from %s", path)
    return str(path)


def _finish(cfg: DictConfig, run_dir: Path, objects: Objects, summary: Summary | None, keep: bool) -> None:
    """Export, and write what was measured last; with `keep`, beside what `result.json` holds already."""
    model_dir = run_dir / "model"
    adapter = has_adapter(objects.policy)
    if cfg.get("export_at_end", True):
        export_policy(objects.policy, model_dir, adapter="keep" if adapter else "merge", force=True)
    found = {name: float(value) for name, value in objects.trainer.callback_metrics.items()}
    metrics = as_written(found, failed_benchmarks(_callbacks(objects.trainer)))
    result = run_dir / "result.json"
    if keep and result.exists():
        metrics = json.loads(result.read_text(encoding="utf-8")) | metrics
    result.write_text(json.dumps(metrics, indent=2), encoding="utf-8")
    if summary is not None:
        summary.model_dir = str(model_dir)
        checkpoint = _last_checkpoint(objects.trainer)
        summary.next_commands = next_commands(objects, checkpoint, _typed(run_dir))
        (run_dir / "history.json").write_text(json.dumps(summary.history, indent=2), encoding="utf-8")
        print(summary.text(objects.trainer), flush=True)


def _callbacks(trainer: L.Trainer) -> list[L.Callback]:
    # Lightning sets the attribute where type checkers do not see it.
    return trainer.callbacks  # type: ignore[attr-defined]


def _last_checkpoint(trainer: L.Trainer) -> Path | None:
    saved = [c.newest for c in _callbacks(trainer) if isinstance(c, RolloutCheckpoint)]
    return saved[0] if saved else None


def next_commands(objects: Objects, checkpoint: Path | None, overrides: Sequence[str] = ()) -> list[str]:
    """What to try after a run with these overrides that left this checkpoint, for pasting into a shell."""
    program = "python -m dare_lightning"
    if checkpoint is None:
        commands = [f"{program} fit --help"]
    else:
        word = shlex.quote(f"ckpt_path={checkpoint}")
        # Data with answers have no prompts to take.
        asked = "" if isinstance(objects.data, PromptDataModule) else " 'prompt=What is 6 times 7?'"
        commands = [f"{program} generate {word}{asked}", f"{program} eval {word}", f"{program} export {word}"]
    if objects.method.online:
        # The same model and data under both methods; what belongs to one method or one run is left out.
        kept = [o for o in overrides if not o.startswith(("method", "run_dir=", "ckpt_path="))]
        commands.append(" ".join([f"{program} fit -m method=d1,coupled_grpo", *map(shlex.quote, kept)]))
    stores = [logger.tracking_uri for logger in objects.trainer.loggers if isinstance(logger, MLflowLogger)]
    # A server shows its own pages.
    local = [uri for uri in stores if not uri.startswith(("http:", "https:"))]
    return [*commands, *(f"mlflow ui --backend-store-uri {shlex.quote(uri)}" for uri in local)]


def _typed(run_dir: Path) -> list[str]:
    return (run_dir / "overrides.txt").read_text(encoding="utf-8").splitlines()


class _Start(L.Callback):
    """Prints the command that goes on with this run, once there is a checkpoint for it.

    Attributes:
        seen: whether anything was trained.
    """

    def __init__(self, run_dir: Path, typed: list[str]) -> None:
        self.run_dir = run_dir
        kept = [word for word in typed if not word.startswith(("ckpt_path=", "run_dir="))]
        words = [*kept, f"run_dir={run_dir}", f"ckpt_path={run_dir / 'checkpoints'}"]
        self.command = "python -m dare_lightning fit " + " ".join(shlex.quote(word) for word in words)
        self.seen = False

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Before the first batch the starting checkpoint is there."""
        if not self.seen and trainer.is_global_zero:
            say(f"run folder: {self.run_dir}\nif it stops, go on with:\n  {self.command}")
        self.seen = True


def load_checkpoint(path: str) -> dict[str, object]:
    """A training checkpoint's content, read without running any code.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        content: dict[str, object] = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError) as error:
        raise ValueError(f"{path} is damaged and cannot be read: {error}") from error
    return content
