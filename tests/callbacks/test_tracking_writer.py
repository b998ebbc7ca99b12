"""The background writer, with sinks that fail on demand."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from dare_lightning.callbacks.tracking_writer import (
    BackgroundWriter,
    Point,
    Points,
    Record,
    RecordRejected,
    StoreUnreachable,
    Tags,
)


class Memory:
    """Keeps what it is given; unreachable or picky where told."""

    def __init__(self) -> None:
        self.up = threading.Event()
        self.up.set()
        self.records: list[Record] = []
        self.calls = 0

    def connect(self) -> None:
        self._check()

    def write(self, records: Sequence[Record]) -> None:
        self._check()
        self.calls += 1
        if any(isinstance(record, Tags) and "bad" in record.values for record in records):
            raise RecordRejected("no bad tags")
        self.records += records

    def _check(self) -> None:
        if not self.up.is_set():
            raise StoreUnreachable("gone")

    def steps(self) -> list[int]:
        return [point.step for record in self.records if isinstance(record, Points) for point in record.points]


def point(step: int) -> Points:
    return Points((Point("loss", 1.0, step, 0),))


@pytest.fixture
def memory() -> Memory:
    return Memory()


def test_records_arrive_in_order_and_points_travel_together(memory: Memory) -> None:
    writer = BackgroundWriter(memory, gather_seconds=5)
    for step in range(50):
        writer.put(point(step))
    writer.put(Tags({"a": "b"}))
    writer.put(point(50))
    assert writer.flush(10, 10)
    assert memory.steps() == list(range(51))
    assert memory.records[50] == Tags({"a": "b"})
    assert memory.calls < 10


def test_an_outage_delays_and_loses_nothing(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    memory.up.clear()
    writer = BackgroundWriter(memory)
    for step in range(5):
        writer.put(point(step))
    assert not writer.flush(0.3, 0.3)
    memory.up.set()
    assert writer.flush(10, 10)
    assert memory.steps() == list(range(5))
    assert caplog.text.count("does not answer") == 1
    assert caplog.text.count("answers again") == 1


def test_a_full_buffer_gives_up_the_oldest_points_and_counts_them(memory: Memory) -> None:
    memory.up.clear()
    writer = BackgroundWriter(memory, capacity=3)
    writer.put(Tags({"a": "b"}))
    for step in range(5):
        writer.put(point(step))
    memory.up.set()
    assert writer.flush(10, 10)
    assert memory.steps() == [2, 3, 4]
    assert Tags({"a": "b"}) in memory.records
    assert writer.lost == 2


def test_a_rejected_record_does_not_hold_up_the_others(memory: Memory) -> None:
    writer = BackgroundWriter(memory)
    writer.put(point(0))
    writer.put(Tags({"bad": ""}))
    writer.put(point(1))
    assert writer.flush(10, 10)
    assert memory.steps() == [0, 1]
    assert writer.rejected == ["no bad tags"]
