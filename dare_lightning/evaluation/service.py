"""Every rank answers what one rank asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dare_lightning.evaluation.attempt import Attempt
from dare_lightning.parallel.control import ControlGroup

Operation = Callable[[Sequence[Any]], list[Any]]
"""Items -> one result each, in order."""


class ServiceError(RuntimeError):
    """An operation failed on some rank."""


class PolicyService:
    """Lets one driver on rank 0 use the policies of all ranks.

    While `serve` runs, rank 0 drives and the others wait for requests. A request's items are dealt to the ranks in
    turn, padded with a repeat where they do not divide, so that every rank computes equally many and collective
    operations inside (sharded weights) meet; the results come back in the order of the items. What goes wrong on any
    rank is an error of that request on rank 0; the other ranks go on waiting.

    Args:
        operations: name -> what every rank can compute. The same names on every rank.
    """

    def __init__(self, operations: Mapping[str, Operation]) -> None:
        self.operations = dict(operations)
        self._group: ControlGroup | None = None

    def serve(self, driver: Callable[[], Any]) -> Any:
        """Run `driver` on rank 0 and give every rank what it returns. Every rank must call it.

        Raises:
            ServiceError: on the other ranks, where the driver failed; rank 0 raises the driver's own error.
        """
        if self._group is None:
            self._group = ControlGroup()
        if self._group.rank > 0:
            return self._wait(self._group)
        outcome: tuple[str, Any] = ("failed", "interrupted")
        try:
            with Attempt() as attempt:
                outcome = ("done", driver())
            if attempt.error is not None:
                outcome = ("failed", attempt.reason)
                raise attempt.error
            return outcome[1]
        finally:
            self._group.broadcast(outcome)

    def call(self, name: str, items: Sequence[Any]) -> list[Any]:
        """On rank 0, inside a driver: the results of an operation for all items, in order.

        Raises:
            KeyError: there is no such operation.
            ServiceError: it failed on some rank, or did not return one result for each item.
            RuntimeError: called outside of `serve`.
        """
        if name not in self.operations:
            raise KeyError(f"no operation {name!r}; there are {', '.join(self.operations)}")
        if self._group is None:
            raise RuntimeError("call is for the driver that serve runs")
        if not items:
            return []
        self._group.broadcast(("call", (name, list(items))))
        return self._compute(self._group, name, items)

    def _wait(self, group: ControlGroup) -> Any:
        while True:
            kind, content = group.broadcast(None)
            if kind == "done":
                return content
            if kind == "failed":
                raise ServiceError(f"the evaluation failed on rank 0: {content}")
            name, items = content
            with Attempt() as attempt:
                self._compute(group, name, items)
            if attempt.error is not None and not isinstance(attempt.error, ServiceError):
                raise attempt.error

    def _compute(self, group: ControlGroup, name: str, items: Sequence[Any]) -> list[Any]:
        mine = [items[place % len(items)] for place in range(group.rank, _padded(len(items), group.world), group.world)]
        results: list[Any] = []
        with Attempt() as attempt:
            results = self.operations[name](mine)
            if len(results) != len(mine):
                raise ValueError(f"{name} returned {len(results)} results for {len(mine)} items")
        gathered = group.gather((attempt.reason, results))
        failures = [f"rank {rank}: {reason}" for rank, (reason, _) in enumerate(gathered) if reason]
        if failures:
            raise ServiceError(f"{name} failed on {'; '.join(failures)}") from attempt.error
        return [gathered[place % group.world][1][place // group.world] for place in range(len(items))]


def _padded(count: int, world: int) -> int:
    return -(-count // world) * world
