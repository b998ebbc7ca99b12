"""Where the blocks of a response lie, and how many planned steps each of them takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """K blocks.

    Attributes:
        bounds: K + 1 response columns; block k is columns bounds[k] to bounds[k + 1] - 1.
        first_steps: K + 1 steps of the whole plan; block k takes steps first_steps[k] to first_steps[k + 1] - 1. All
            0 where no number of steps is planned.
    """

    bounds: tuple[int, ...]
    first_steps: tuple[int, ...]

    @property
    def new_tokens(self) -> int:
        """G, the columns of the response."""
        return self.bounds[-1]

    @property
    def steps(self) -> int:
        """Planned steps of a response; 0 where none are planned."""
        return self.first_steps[-1]

    @property
    def widest(self) -> int:
        """Columns of the longest block."""
        return max(end - start for start, end in zip(self.bounds, self.bounds[1:], strict=False))


def even_layout(new_tokens: int, block_length: int, steps: int | None) -> Layout:
    """Blocks of equal length that take equally many steps; None where no number is planned.

    Raises:
        ValueError: numbers that do not divide.
    """
    if block_length < 1 or new_tokens % block_length:
        divisors = [d for d in range(1, new_tokens + 1) if new_tokens % d == 0]
        raise ValueError(
            f"block_length={block_length} does not divide max_new_tokens={new_tokens}; "
            f"{nearest(block_length, divisors)} would"
        )
    blocks = new_tokens // block_length
    bounds = tuple(range(0, new_tokens + 1, block_length))
    if steps is None:
        return Layout(bounds, (0,) * (blocks + 1))
    if steps % blocks:
        below = steps - steps % blocks
        multiples = [value for value in (below, below + blocks) if value > 0]
        raise ValueError(
            f"steps={steps} is not a multiple of the {blocks} blocks (max_new_tokens={new_tokens} / "
            f"block_length={block_length}); {nearest(steps, multiples)} would be"
        )
    return Layout(bounds, tuple(range(0, steps + 1, steps // blocks)))


def nearest(found: int, valid: Sequence[int]) -> str:
    """The closest valid number on either side, in words."""
    below = [value for value in valid if value < found][-1:]
    above = [value for value in valid if value > found][:1]
    return " or ".join(str(value) for value in below + above)
