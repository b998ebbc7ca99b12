"""How the samples of an optimiser step become micro-batches: by their number, or by their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dare_lightning.replay.batch import SequenceBatch

Item = TypeVar("Item")


class Batches:
    """A sized iterable of batches, each made when its turn comes."""

    def __init__(self, makers: Sequence[Callable[[], SequenceBatch]]) -> None:
        self.makers = makers

    def __len__(self) -> int:
        return len(self.makers)

    def __iter__(self) -> Iterator[SequenceBatch]:
        return (make() for make in self.makers)


def by_number(samples: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """`size` samples each, in their order."""
    return [samples[start : start + size] for start in range(0, len(samples), size)]


@dataclass(frozen=True)
class TokenSplit:
    """Parts of at most `budget` tokens, as many for every step.

    Lightning accumulates a fixed number of micro-batches, so the number is what the longest samples of the data need
    where they meet in one step. The r-th longest sample of a step goes where the r-th longest of the data would:
    no step can then exceed the budget, and shorter steps are spread over the same number of parts.

    Attributes:
        part_of: the part of the r-th longest sample of a step.
    """

    part_of: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Sequence[int], step: int, budget: int) -> TokenSplit:
        """The plan for steps of `step` samples out of data with these lengths in tokens.

        Raises:
            ValueError: one sample alone exceeds the budget.
        """
        longest = sorted(lengths, reverse=True)[:step]
        if longest[0] > budget:
            raise ValueError(
                f"a sample of {longest[0]} tokens exceeds data.max_tokens={budget} alone; raise it, or lower"
                " data.max_length"
            )
        parts = -(-sum(longest) // budget)
        while max(_loads(found := _lightest_first(longest, parts), longest)) > budget:
            parts += 1
        return cls(tuple(found))

    @property
    def parts(self) -> int:
        """Micro-batches of a full step."""
        return max(self.part_of) + 1

    def split(self, samples: Sequence[Item], length: Callable[[Item], int]) -> list[list[Item]]:
        """The parts of a step's samples, longest first in each; those of a short last step may be fewer."""
        ordered = sorted(samples, key=length, reverse=True)
        parts: list[list[Item]] = [[] for _ in range(self.parts)]
        for sample, part in zip(ordered, self.part_of, strict=False):
            parts[part].append(sample)
        return [part for part in parts if part]


def _lightest_first(lengths: Sequence[int], parts: int) -> list[int]:
    """Each length, longest first, into the part that holds least so far."""
    loads = [0] * parts
    chosen = []
    for length in lengths:
        part = min(range(parts), key=loads.__getitem__)
        loads[part] += length
        chosen.append(part)
    return chosen


def _loads(part_of: Sequence[int], lengths: Sequence[int]) -> list[int]:
    loads = [0] * (max(part_of) + 1)
    for part, length in zip(part_of, lengths, strict=True):
        loads[part] += length
    return loads
