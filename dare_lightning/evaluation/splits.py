"""Train and held-out sets of generated tasks, disjoint by construction."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Literal, TypeVar, get_args

Split = Literal["train", "heldout"]
Task = TypeVar("Task")

HELDOUT_SHARE = 1 / 8
MAX_MISSES = 20_000
"""Draws without a new task after which the space counts as exhausted."""


def split_of(content: str) -> Split:
    """The split a task belongs to, by a hash of its canonical content: whatever the seed, it is never in both."""
    digest = hashlib.sha256(content.encode()).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") < HELDOUT_SHARE * 2**64 else "train"


def draw_distinct(
    draw: Callable[[], Task | None], identity: Callable[[Task], str], canonical: Callable[[Task], str], split: Split
) -> Iterator[Task]:
    """Endless stream of one split's tasks, each identity once.

    Args:
        draw: one attempt; None where it gave no task.
        identity: equal for tasks that should not come twice.
        canonical: what decides the split; equal for tasks that must not come in both.
        split: the wanted one.

    Raises:
        ValueError: an unknown split, or MAX_MISSES draws in a row gave nothing new.
    """
    if split not in get_args(Split):
        raise ValueError(f"split={split!r} is not known; choose one of {', '.join(get_args(Split))}")
    seen: set[str] = set()
    misses = 0
    while misses < MAX_MISSES:
        task = draw()
        misses += 1
        if task is None or identity(task) in seen or split_of(canonical(task)) != split:
            continue
        seen.add(identity(task))
        misses = 0
        yield task
    raise ValueError(
        f"only {len(seen)} different {split} tasks found with these settings: ask for fewer, or widen the settings"
    )
