"""Tracking with MLflow that neither delays nor stops training, and never changes what was recorded."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib.util
import json
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from dare_lightning.callbacks.tracking_names import MAX_VALUE, flatten
from dare_lightning.callbacks.tracking_process import ProcessRun
from dare_lightning.callbacks.tracking_store import (
    RUN_ID_FILE,
    StoreSettings,
    TrackedRun,
    local_store,
    now_ms,
    parent_run_id,
)
from dare_lightning.callbacks.tracking_system import system_metrics
from dare_lightning.callbacks.tracking_writer import (
    Artifact,
    BackgroundWriter,
    Document,
    Params,
    Point,
    Points,
    Record,
    Status,
    Tags,
)

log = logging.getLogger(__name__)

UNSENT_FILE = "mlflow_unsent.jsonl"


class MLflowLogger(Logger):
    """Records a run in an MLflow store, in the background.

    Without an address the store is an sqlite file that all runs below `save_dir` share; no server is needed. A store
    that does not answer never stops training: metrics are kept (up to `buffer` points) and sent when it answers; what
    could not be stored by the end is counted, reported once, and left in `mlflow_unsent.jsonl` in the run folder.
    Names, long values, changed values and non-finite metrics: see `tracking_names` and `tracking_store.TrackedRun`.

    A run folder that holds `mlflow_run_id.txt` was tracked before: the same run goes on.

    Args:
        save_dir: folder of all runs; holds `mlflow.db` and `mlartifacts/` where no address is given.
        run_dir: this run's folder; None takes `save_dir`.
        experiment_name: MLflow experiment.
        run_name: None takes the run folder's name.
        tracking_uri: `sqlite:///...` or a server's `http://...`; None is the local store.
        artifact_location: where a new experiment keeps artifacts; None takes `save_dir/mlartifacts` for a local
            store and leaves it to a server.
        run_id: the MLflow run to go on with; None looks into the run folder, then makes a new one.
        tags: further tags.
        system_seconds: how often CPU, memory and GPU load are recorded; 0 never.
        buffer: metric points kept while the store does not answer.
        patience: seconds that the end of a run waits for a store that does not answer.
        own_process: import and call MLflow in a process of its own, so that training does not share the interpreter
            with it; else in a thread.

    Raises:
        ImportError: MLflow is not installed.
    """

    def __init__(
        self,
        save_dir: str | Path = "runs",
        run_dir: str | Path | None = None,
        experiment_name: str = "dare",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        artifact_location: str | None = None,
        run_id: str | None = None,
        tags: Mapping[str, str] | None = None,
        system_seconds: float = 10.0,
        buffer: int = 100_000,
        patience: float = 10.0,
        own_process: bool = False,
    ) -> None:
        super().__init__()
        if importlib.util.find_spec("mlflow") is None:
            raise ImportError("logger=mlflow needs MLflow: pip install mlflow, or choose logger=csv")
        self.run_dir = Path(run_dir or save_dir).resolve()
        local_uri, local_artifacts = local_store(Path(save_dir))
        if tracking_uri is None or tracking_uri == local_uri:
            artifact_location = artifact_location or local_artifacts
        self._experiment_name = experiment_name
        self._patience = patience
        self._last_step = 0
        self._started = False
        self._open = True
        self._last_status = "FAILED"
        self._reported = False
        settings = StoreSettings(
            tracking_uri=tracking_uri or local_uri,
            artifact_location=artifact_location,
            experiment=experiment_name,
            run_name=run_name or self.run_dir.name,
            run_id=run_id or read_run_id(self.run_dir),
            tags=dict(tags or {}),
        )
        self.tracking_uri = settings.tracking_uri
        kind = ProcessRun if own_process else TrackedRun
        self._run: ProcessRun | TrackedRun = kind(settings, lambda: _origin_tags(self.run_dir), self._remember_run)
        self._writer = BackgroundWriter(
            self._run,
            capacity=buffer,
            idle=self._system_sample if system_seconds else lambda: None,
            idle_seconds=system_seconds or 3600.0,
        )

    # What Lightning asks for.

    @property
    def name(self) -> str:
        """The experiment's name."""
        return self._experiment_name

    @property
    def version(self) -> str:
        """The run folder's name; MLflow's own id comes later (`run_id`)."""
        return self.run_dir.name

    @property
    def save_dir(self) -> str:
        """The run folder."""
        return str(self.run_dir)

    @property
    def experiment(self) -> ProcessRun | TrackedRun:
        """The tracked run. Lightning asks for it when it begins, which starts or reopens the run without waiting."""
        self._start()
        if not self._open:
            self._open = True
            self._writer.put(Status("RUNNING", now_ms()))
        return self._run

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; None until the store has made one."""
        return self._run.run_id

    @property
    def client(self) -> Any:
        """The MlflowClient, for what this class does not offer; None until the store has answered (see `flush`)."""
        return self._run.client

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Queue metric values; text values are left out."""
        self._last_step = self._last_step if step is None else step
        numbers = {name: value for name, value in metrics.items() if not isinstance(value, str)}
        self._put(_points(numbers, self._last_step))

    @rank_zero_only
    def log_hyperparams(self, params: Mapping[str, Any] | argparse.Namespace, *args: Any, **kwargs: Any) -> None:
        """Queue parameters; those that are too long for the store are whole in the artifact `hparams.yaml`."""
        nested = vars(params) if isinstance(params, argparse.Namespace) else dict(params)
        if not nested:
            return
        flat = flatten(nested)
        if any(len(str(value)) > MAX_VALUE for value in flat.values()):
            self._put(Document("hparams.yaml", _as_yaml(nested)))
        self._put(Params(flat, "hparams.yaml"))

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Close the run: FINISHED, FAILED, or KILLED after Ctrl-C or SIGTERM.

        Success does not wait for the store, because Lightning ends every validation with it; `close` does, at the
        latest when the process exits. The two others wait, because the process may be about to be killed.
        """
        if not self._started:
            return
        cause = sys.exc_info()[1]
        if status in ("success", "finished", "FINISHED"):
            final = "FINISHED"
        elif isinstance(cause, (KeyboardInterrupt, SIGTERMException)):
            final = "KILLED"
        else:
            final = "FAILED"
        if cause is not None and final == "FAILED":
            self._put(Tags({"error": f"{type(cause).__name__}: {cause}"[:1000]}))
        self._finish(final)
        if final != "FINISHED":
            self.close()

    # What this project adds.

    @rank_zero_only
    def log_config(self, config: Mapping[str, Any]) -> None:
        """Queue the run's whole configuration: the artifact `config.yaml` has all of it, parameters what fits."""
        self._put(Document("config.yaml", _as_yaml(config)))
        self._put(Params(flatten(config), "config.yaml"))

    @rank_zero_only
    def log_tags(self, tags: Mapping[str, str]) -> None:
        """Queue tags."""
        self._put(Tags(dict(tags)))

    @rank_zero_only
    def log_file(self, file: Path, folder: str = "", table: bool = False) -> None:
        """Queue a local file as an artifact; it is read later, so it has to stay.

        Args:
            file: the file.
            folder: artifact folder.
            table: a JSON Lines file, also shown as a table.
        """
        self._put(Artifact(Path(file).resolve(), folder, table))

    @rank_zero_only
    def flush(self, patience: float = 60.0) -> bool:
        """Wait until everything queued is stored; False where the store does not take it in time."""
        return self._writer.flush(patience, self._patience)

    @rank_zero_only
    def close(self, patience: float = 180.0) -> None:
        """Wait until everything queued is stored, and say once what could not be. Runs at exit by itself.

        Args:
            patience: seconds to wait for a store that has not failed so far; a busy machine may take minutes to
                create a database. One that does not answer is waited for `patience` of the constructor.
        """
        if self._started:
            self.flush(patience)
            self._report()

    def _put(self, record: Record) -> None:
        self._start()
        self._writer.put(record)

    @rank_zero_only
    def _start(self) -> None:
        if self._started:
            return
        self._started = True
        # CPU load is measured from one call to the next.
        system_metrics()
        atexit.register(self._at_exit)
        for record in _take_unsent(self.run_dir):
            self._writer.put(record)
        self._writer.start()

    def _remember_run(self, run_id: str) -> None:
        # The run folder may be on a full disk; the run is tracked all the same.
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            (self.run_dir / RUN_ID_FILE).write_text(f"{run_id}\n")
        except OSError as error:
            log.warning("cannot note the tracked run %s in %s (%s)", run_id, self.run_dir, error)

    def _system_sample(self) -> Record | None:
        return _points(system_metrics(), self._last_step) if self._open else None

    def _finish(self, status: str) -> None:
        self._open = False
        self._last_status = status
        self._writer.put(_points(system_metrics(), self._last_step))
        self._writer.put(Status(status, now_ms()))

    def _report(self) -> None:
        """Say once what was not stored, and keep it beside the run."""
        left = [point for record in self._writer.unsent() if isinstance(record, Points) for point in record.points]
        kept = ""
        if left:
            # The disk may be what fails.
            with contextlib.suppress(OSError):
                self.run_dir.mkdir(parents=True, exist_ok=True)
                with (self.run_dir / UNSENT_FILE).open("a") as file:
                    file.writelines(json.dumps(asdict(point)) + "\n" for point in left)
                kept = f"; {len(left)} of them are in {self.run_dir / UNSENT_FILE} and are sent when the run is resumed"
        lost = self._writer.lost + len(left)
        problems = [*self._writer.rejected, *([self._writer.outage] if self._writer.outage else [])]
        if (lost or problems) and not self._reported:
            self._reported = True
            why = f" ({'; '.join(dict.fromkeys(problems))})" if problems else ""
            log.warning("tracking: %d metric values were not stored in %s%s%s", lost, self.tracking_uri, why, kept)

    def _at_exit(self) -> None:
        if self._open:
            self._finish(self._last_status)
        self.close()
        self._run.stop()


def read_run_id(folder: Path) -> str | None:
    """The MLflow run that a run folder was tracked in."""
    file = folder / RUN_ID_FILE
    return file.read_text().strip() or None if file.is_file() else None


def find_run_id(checkpoint: Path) -> str | None:
    """The MLflow run that wrote a checkpoint: the nearest folder above it that was tracked."""
    return next((found for folder in Path(checkpoint).resolve().parents if (found := read_run_id(folder))), None)


def _points(metrics: Mapping[str, float], step: int) -> Points:
    time_ms = now_ms()
    return Points(tuple(Point(name, float(value), step, time_ms) for name, value in metrics.items()))


def _as_yaml(content: Mapping[str, Any]) -> str:
    return yaml.safe_dump(_plain(content), sort_keys=False, allow_unicode=True)


def _plain(value: Any) -> Any:
    """What YAML cannot say plainly (paths, types) as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    # Exact types: YAML refuses subclasses such as NumPy's float.
    return value if type(value) in (str, int, float, bool, type(None)) else str(value)


def _take_unsent(run_dir: Path) -> list[Record]:
    file = run_dir / UNSENT_FILE
    if not file.is_file():
        return []
    points = tuple(Point(**json.loads(line)) for line in file.read_text().splitlines())
    file.unlink()
    return [Points(points[start : start + 500]) for start in range(0, len(points), 500)]


def _origin_tags(run_dir: Path) -> dict[str, str]:
    tags = {"command": shlex.join(sys.argv), "run_dir": str(run_dir)}
    tags["overrides"] = shlex.join(argument for argument in sys.argv[1:] if "=" in argument)
    if (parent := parent_run_id(run_dir.parent)) is not None:
        tags["mlflow.parentRunId"] = parent
    if (commit := _git("rev-parse", "HEAD")) is not None:
        tags["mlflow.source.git.commit"] = commit
        tags["git.dirty"] = str(bool(_git("status", "--porcelain", "--untracked-files=no"))).lower()
    if "USER" in os.environ:
        tags["mlflow.user"] = os.environ["USER"]
    return tags


def _git(*command: str) -> str | None:
    """What git says about the code that runs; None where it is no repository or there is no git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *command], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
