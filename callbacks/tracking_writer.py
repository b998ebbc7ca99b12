"""A background thread that hands records to a slow or absent store, in order, while training goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Point:
    """One value of one metric; `time_ms` since the epoch."""

    name: str
    value: float
    step: int
    time_ms: int


@dataclass(frozen=True)
class Points:
    """Metric values logged together."""

    points: tuple[Point, ...]


@dataclass(frozen=True)
class Params:
    """Parameters by their original names, and the artifact that holds them whole."""

    values: dict[str, object]
    whole_in: str


@dataclass(frozen=True)
class Tags:
    """Tags by their original names."""

    values: dict[str, str]


@dataclass(frozen=True)
class Artifact:
    """A local file and the artifact folder it goes to.

    `table` additionally shows a JSON Lines file as a table in the store's own pages.
    """

    file: Path
    folder: str = ""
    table: bool = False


@dataclass(frozen=True)
class Document:
    """A text artifact that never replaces an earlier one of its name."""

    name: str
    text: str


@dataclass(frozen=True)
class Status:
    """The run's status: RUNNING, FINISHED, FAILED or KILLED."""

    status: str
    time_ms: int


Record = Points | Params | Tags | Artifact | Document | Status


class StoreUnreachable(Exception):
    """The store does not answer now; the same records may succeed later."""


class RecordRejected(Exception):
    """The store answered and will never take this record."""


class Sink(Protocol):
    """Where the records go. Called from the writer's thread only."""

    def connect(self) -> None:
        """Make ready; raises StoreUnreachable."""
        ...

    def write(self, records: Sequence[Record]) -> None:
        """Store them; several only where all are Points. Raises StoreUnreachable or RecordRejected."""
        ...


class BackgroundWriter:
    """Keeps records until the sink has taken them.

    Args:
        sink: where they go.
        capacity: metric points kept while the sink does not answer; beyond it the oldest are given up and counted.
        idle: called about every `idle_seconds` from the writer's thread; what it returns is written too.
        gather_seconds: how long points may wait for company, so that a store call carries many.
    """

    BATCH = 1000
    SLOWEST_RETRY = 30.0

    def __init__(
        self,
        sink: Sink,
        capacity: int = 100_000,
        idle: Callable[[], Record | None] = lambda: None,
        idle_seconds: float = 10.0,
        gather_seconds: float = 1.0,
    ) -> None:
        self._sink = sink
        self._capacity = capacity
        self._idle = idle
        self._idle_seconds = idle_seconds
        self._gather_seconds = gather_seconds
        self._records: deque[Record] = deque()
        self._waiting_points = 0
        self._changed = threading.Condition()
        self._urgent = False
        self._connected = False
        self._thread: threading.Thread | None = None
        self.outage: str | None = None
        self.lost = 0
        self.rejected: list[str] = []

    def start(self) -> None:
        """Start the thread; harmless when it runs already."""
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
                self._thread.start()

    def put(self, record: Record) -> None:
        """Queue a record; never waits for the store."""
        with self._changed:
            self._records.append(record)
            if isinstance(record, Points):
                self._waiting_points += len(record.points)
                if self._waiting_points > self._capacity:
                    self._give_up_oldest()
            self._changed.notify_all()
        self.start()

    def flush(self, patience: float, outage_patience: float) -> bool:
        """Wait until everything queued is stored; False where the store did not take it in time.

        Args:
            patience: seconds to wait for a store that has not failed (its creation takes seconds).
            outage_patience: seconds to wait for one that does not answer.
        """
        started = time.monotonic()
        with self._changed:
            self._urgent = True
            self._changed.notify_all()
            while self._records and self._thread is not None and self._thread.is_alive():
                limit = outage_patience if self.outage else patience
                left = started + limit - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(min(left, 0.2))
            self._urgent = False
            return not self._records

    def unsent(self) -> list[Record]:
        """Take what is still queued out of the queue. What the thread is just sending may arrive all the same."""
        with self._changed:
            left = list(self._records)
            self._records.clear()
            self._waiting_points = 0
            return left

    def _give_up_oldest(self) -> None:
        for place, record in enumerate(self._records):
            if isinstance(record, Points):
                del self._records[place]
                self._waiting_points -= len(record.points)
                self.lost += len(record.points)
                return

    def _work(self) -> None:
        retry = 0.5
        next_idle = time.monotonic() + min(1.0, self._idle_seconds)
        while True:
            if time.monotonic() >= next_idle:
                next_idle = time.monotonic() + self._idle_seconds
                sample = self._idle()
                if sample is not None and not self.outage:
                    self.put(sample)
            batch = self._next_batch(next_idle)
            if self._connected and not batch:
                continue
            try:
                if not self._connected:
                    self._sink.connect()
                    self._connected = True
                if batch:
                    self._sink.write(batch)
            except StoreUnreachable as error:
                self._note_outage(str(error))
                self._pause(retry)
                retry = min(retry * 2, self.SLOWEST_RETRY)
                continue
            except RecordRejected as error:
                self.rejected = [*self.rejected[-20:], str(error)]
                self.lost += sum(len(record.points) for record in batch if isinstance(record, Points))
            retry = 0.5
            self._note_recovery()
            self._drop(batch)

    def _next_batch(self, deadline: float) -> list[Record]:
        """The next record, or all points up to the next other record. Left in the queue until they are stored."""
        with self._changed:
            if not self._records and self._connected:
                self._changed.wait(max(0.0, deadline - time.monotonic()))
            gather_until = time.monotonic() + self._gather_seconds
            while self._records and self._only_points() and not self._urgent:
                left = gather_until - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            batch: list[Record] = []
            points = 0
            for record in self._records:
                size = len(record.points) if isinstance(record, Points) else self.BATCH
                if batch and points + size > self.BATCH:
                    break
                batch.append(record)
                points += size
            return batch

    def _only_points(self) -> bool:
        return self._waiting_points < self.BATCH and all(isinstance(record, Points) for record in self._records)

    def _drop(self, batch: Sequence[Record]) -> None:
        with self._changed:
            for record in batch:
                # The queue's head may have been given up, or everything taken out, while this was being sent.
                if self._records and self._records[0] is record:
                    self._records.popleft()
                    if isinstance(record, Points):
                        self._waiting_points -= len(record.points)
            self._changed.notify_all()

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        with self._changed:
            while (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
                if self._urgent:
                    until = min(until, time.monotonic() + 0.5)

    def _note_outage(self, error: str) -> None:
        if self.outage is None:
            log.warning("tracking does not answer (%s); training goes on, metrics are kept and sent later", error)
        self.outage = error

    def _note_recovery(self) -> None:
        if self.outage is not None:
            log.warning("tracking answers again; sending what was kept")
        self.outage = None
