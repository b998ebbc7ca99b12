"""Messages between ranks while one of them is busy for long with something else than the GPU."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import distributed

from dare_lightning.parallel.collectives import rank_and_world

PATIENCE = timedelta(days=2)
"""How long the other ranks wait; scoring a benchmark on rank 0 may take hours."""


class ControlGroup:
    """A process group of its own for objects, over the CPU, so that no GPU watchdog counts the waiting.

    Making one is collective: every rank must do it at the same point. In a single process it does nothing.
    """

    def __init__(self) -> None:
        self.rank, self.world = rank_and_world()
        self._group = distributed.new_group(backend="gloo", timeout=PATIENCE) if self.world > 1 else None

    def broadcast(self, value: Any) -> Any:
        """Rank 0's `value`, on every rank."""
        if self._group is None:
            return value
        box = [value]
        distributed.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Everybody's `value`, by rank."""
        if self._group is None:
            return [value]
        gathered: list[Any] = [None] * self.world
        distributed.all_gather_object(gathered, value, group=self._group)
        return gathered
