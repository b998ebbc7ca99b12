"""The MLflow side of tracking: opening a store, one run in it, parent runs of sweeps.

MLflow takes seconds to import and to create a database, so nothing here is imported before it is needed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dare_lightning.callbacks.tracking_names import stored_name, stored_value
from dare_lightning.callbacks.tracking_writer import (
    Artifact,
    Document,
    Params,
    Point,
    Points,
    Record,
    RecordRejected,
    Status,
    StoreUnreachable,
    Tags,
)

log = logging.getLogger(__name__)

PARENT_VARIABLE = "DARE_MLFLOW_PARENT"
PARENT_FILE = ".mlflow_parent"
RUN_ID_FILE = "mlflow_run_id.txt"
_MAX_TAG = 5000
_SHOWN_TABLES = 50
# Answers that will be the same however often they are asked for.
_FINAL_ERRORS = {
    "INVALID_PARAMETER_VALUE",
    "BAD_REQUEST",
    "RESOURCE_DOES_NOT_EXIST",
    "RESOURCE_ALREADY_EXISTS",
    "INVALID_STATE",
    "PERMISSION_DENIED",
}


@dataclass(frozen=True)
class StoreSettings:
    """Which store, and what a new run in it is called.

    Attributes:
        tracking_uri: `sqlite:///...` or a server's address.
        artifact_location: folder of artifacts of an experiment that has to be created; None leaves it to the store.
        experiment: experiment name.
        run_name: name of a new run.
        run_id: the run to go on with; None makes a new one.
        tags: tags of a new run.
    """

    tracking_uri: str
    artifact_location: str | None
    experiment: str
    run_name: str | None = None
    run_id: str | None = None
    tags: dict[str, str] = field(default_factory=dict)


def local_store(folder: Path) -> tuple[str, str]:
    """Tracking address and artifact location of the store that lies in this folder."""
    folder = folder.resolve()
    return f"sqlite:///{folder / 'mlflow.db'}", str(folder / "mlartifacts")


@contextmanager
def _one_at_a_time(tracking_uri: str) -> Iterator[None]:
    """Hold a lock beside a local database: jobs that start together must not create it together."""
    from filelock import FileLock

    prefix = "sqlite:///"
    if not tracking_uri.startswith(prefix):
        yield
        return
    database = Path(tracking_uri.removeprefix(prefix))
    database.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{database}.lock", timeout=120):
        yield


@contextmanager
def _translated() -> Iterator[None]:
    """Turn what MLflow, the network and the disk raise into the writer's two exceptions."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except MlflowException as error:
        kind = RecordRejected if error.error_code in _FINAL_ERRORS else StoreUnreachable
        raise kind(str(error).splitlines()[0][:200]) from error
    except (OSError, SQLAlchemyError) as error:
        raise StoreUnreachable(f"{type(error).__name__}: {error}"[:200]) from error


def open_client(tracking_uri: str) -> Any:
    """An MlflowClient whose calls give up soon, because the writer retries by itself.

    Raises:
        StoreUnreachable: the store does not answer, or the database is of another MLflow version.
    """
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.tracking import MlflowClient

    # The first announces every table and prints every failure that is retried here.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    with _translated(), _one_at_a_time(tracking_uri):
        return MlflowClient(tracking_uri)


def experiment_id(client: Any, settings: StoreSettings) -> str:
    """The experiment of this name: found, brought back from deletion, or created."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(settings.experiment)
    if found is None:
        try:
            return str(client.create_experiment(settings.experiment, artifact_location=settings.artifact_location))
        except MlflowException as error:
            # Another job was faster.
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = client.get_experiment_by_name(settings.experiment)
    if found.lifecycle_stage == "deleted":
        log.warning("experiment %s had been deleted from the tracking store; restoring it", settings.experiment)
        client.restore_experiment(found.experiment_id)
    return str(found.experiment_id)


def start_parent_run(tracking_uri: str, artifact_location: str | None, experiment: str, name: str) -> str | None:
    """Create the run that the jobs of a sweep hang under; None (with a warning) where the store does not answer.

    Hand the id to the jobs in the environment variable `DARE_MLFLOW_PARENT`, or in the file `.mlflow_parent` of the
    sweep's folder where a scheduler drops the environment.
    """
    settings = StoreSettings(tracking_uri, artifact_location, experiment, name)
    try:
        client = open_client(tracking_uri)
        with _translated(), _one_at_a_time(tracking_uri):
            return str(client.create_run(experiment_id(client, settings), run_name=name).info.run_id)
    except (StoreUnreachable, RecordRejected) as error:
        log.warning("the sweep's parent run cannot be tracked (%s); its jobs run all the same", error)
        return None


def finish_parent_run(tracking_uri: str, run_id: str, status: str = "FINISHED") -> None:
    """Close a sweep's run; warns where the store does not answer.

    Args:
        status: FINISHED, FAILED or KILLED.
    """
    try:
        client = open_client(tracking_uri)
        with _translated():
            client.set_terminated(run_id, status)
    except (StoreUnreachable, RecordRejected) as error:
        log.warning("the sweep's parent run %s cannot be closed (%s)", run_id, error)


def parent_run_id(sweep_dir: Path) -> str | None:
    """The sweep's run, from the environment or from the file in the sweep's folder; None outside a sweep."""
    if PARENT_VARIABLE in os.environ:
        return os.environ[PARENT_VARIABLE] or None
    file = sweep_dir / PARENT_FILE
    return file.read_text().strip() or None if file.is_file() else None


class TrackedRun:
    """One MLflow run as the writer's sink.

    What is recorded is never changed: a parameter logged again with another value keeps the first and gets the
    second as `<name>:v2`, the third as `:v3`; a document with other content likewise (`config.v2.yaml`). The tags of
    the n-th resume are prefixed `resume<n>:`.
    NaN and infinities are stored as NaN, because databases hold infinity as 1.8e308; which it was, where and how often
    stands in the tag `nonfinite:<metric>`.

    Args:
        settings: the store and the run.
        origin: called in the writer's thread, gives tags that say what is running.
        on_ready: called with the run's id as soon as there is one.
    """

    def __init__(
        self, settings: StoreSettings, origin: Callable[[], dict[str, str]], on_ready: Callable[[str], None]
    ) -> None:
        self.settings = settings
        self._origin = origin
        self.run_id = settings.run_id
        self._on_ready = on_ready
        self._client: Any = None
        self._params: dict[str, str] = {}
        self._nonfinite: dict[str, Counter[str]] = {}
        self._first_nonfinite: dict[str, str] = {}
        self._tables: list[dict[str, str]] = []

    @property
    def client(self) -> Any:
        """The MlflowClient; None until connected."""
        return self._client

    def connect(self) -> None:
        """Open the store and the run; goes on with an earlier run where there is one."""
        client = open_client(self.settings.tracking_uri)
        try:
            with _translated(), _one_at_a_time(self.settings.tracking_uri):
                tags = {name: value[:_MAX_TAG] for name, value in (self._origin() | self.settings.tags).items()}
                if not (self.run_id and self._reopen(client, self.run_id, tags)):
                    if self.run_id:
                        tags["resumed_from"] = self.run_id
                    experiment = experiment_id(client, self.settings)
                    self.run_id = client.create_run(experiment, tags=tags, run_name=self.settings.run_name).info.run_id
        except RecordRejected as error:
            raise StoreUnreachable(str(error)) from error
        self._client = client
        assert self.run_id is not None
        self._on_ready(self.run_id)

    def _reopen(self, client: Any, run_id: str, tags: dict[str, str]) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            run = client.get_run(run_id)
            if run.info.lifecycle_stage == "deleted":
                client.restore_run(run_id)
            client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            log.warning("run %s is not in %s; tracking goes on in a new one", run_id, self.settings.tracking_uri)
            return False
        self._params = dict(run.data.params)
        self._tables = json.loads(run.data.tags.get("mlflow.loggedArtifacts", "[]"))
        resumes = int(run.data.tags.get("resumes", "0")) + 1
        for name, value in tags.items():
            if run.data.tags.get(name) != value:
                client.set_tag(run_id, f"resume{resumes}:{name}", value)
        client.set_tag(run_id, "resumes", str(resumes))
        return True

    def stop(self) -> None:
        """Nothing is held open between calls."""

    def write(self, records: Sequence[Record]) -> None:
        """Store the records."""
        with _translated():
            points = [point for record in records if isinstance(record, Points) for point in record.points]
            if points:
                self._write_points(points)
            for record in records:
                if isinstance(record, Params):
                    self._write_params(record)
                elif isinstance(record, Tags):
                    for name, value in record.values.items():
                        self._client.set_tag(self.run_id, stored_name(name), value[:_MAX_TAG])
                elif isinstance(record, Artifact):
                    self._write_artifact(record)
                elif isinstance(record, Document):
                    self._write_document(record)
                elif isinstance(record, Status) and record.status == "RUNNING":
                    self._client.update_run(self.run_id, status="RUNNING")
                elif isinstance(record, Status):
                    self._client.set_terminated(self.run_id, record.status, end_time=record.time_ms)

    def _write_points(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        entities = []
        strange = []
        for point in points:
            name, value = stored_name(point.name), point.value
            if not math.isfinite(value):
                strange.append((name, point))
                value = math.nan
            entities.append(Metric(name, value, point.time_ms, point.step))
        for start in range(0, len(entities), 1000):
            self._client.log_batch(self.run_id, metrics=entities[start : start + 1000])
        for name, point in strange:
            self._nonfinite.setdefault(name, Counter())[str(point.value)] += 1
            self._first_nonfinite.setdefault(name, f"{point.value} at step {point.step}")
        for name in {name for name, _ in strange}:
            counts = ", ".join(f"{count} times {value}" for value, count in sorted(self._nonfinite[name].items()))
            self._client.set_tag(self.run_id, f"nonfinite:{name}", f"{self._first_nonfinite[name]} first; {counts}")

    def _write_params(self, record: Params) -> None:
        from mlflow.entities import Param

        fresh: dict[str, str] = {}
        for original, value in record.values.items():
            name, text = stored_name(original), stored_value(value, record.whole_in)
            newest, version = self._newest_param(name)
            if newest is None:
                fresh[name] = text
            elif newest != text:
                fresh[f"{name}:v{version + 1}"] = text
        names = list(fresh)
        for start in range(0, len(names), 100):
            part = names[start : start + 100]
            self._client.log_batch(self.run_id, params=[Param(name, fresh[name]) for name in part])
            self._params.update({name: fresh[name] for name in part})

    def _newest_param(self, name: str) -> tuple[str | None, int]:
        newest, version = self._params.get(name), 1
        while (later := self._params.get(f"{name}:v{version + 1}")) is not None:
            newest, version = later, version + 1
        return newest, version

    def _write_artifact(self, record: Artifact) -> None:
        if not record.file.is_file():
            raise RecordRejected(f"{record.file} is gone")
        self._client.log_artifact(self.run_id, str(record.file), record.folder or None)
        if record.table:
            self._write_table(record)

    def _write_document(self, record: Document) -> None:
        taken = {item.path for item in self._client.list_artifacts(self.run_id)}
        name = Path(record.name)
        version, target, newest = 1, record.name, None
        while target in taken:
            newest, version = target, version + 1
            target = f"{name.stem}.v{version}{name.suffix}"
        if newest is None or self._read(newest) != record.text:
            self._client.log_text(self.run_id, record.text, target)

    def _read(self, artifact: str) -> str:
        return Path(self._client.download_artifacts(self.run_id, artifact)).read_text(encoding="utf-8")

    def _write_table(self, record: Artifact) -> None:
        rows = [json.loads(line) for line in record.file.read_text(encoding="utf-8").splitlines()]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        target = f"{record.folder}/{record.file.stem}.json" if record.folder else f"{record.file.stem}.json"
        data = [[row.get(name) for name in columns] for row in rows]
        self._client.log_dict(self.run_id, {"columns": columns, "data": data}, target)
        entry = {"path": target, "type": "table"}
        self._tables = [*(table for table in self._tables if table != entry), entry][-_SHOWN_TABLES:]
        self._client.set_tag(self.run_id, "mlflow.loggedArtifacts", json.dumps(self._tables))


def now_ms() -> int:
    """Milliseconds since the epoch, as MLflow counts."""
    return int(time.time() * 1000)
