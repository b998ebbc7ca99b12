"""Keys and values of committed blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dare_lightning.families.attention import KeyValueCache


class BlockCache(KeyValueCache):
    """A cache that grows to the right: a pass reads the columns that some row has reached, not the empty ones.

    Args:
        rows: R.
        allocated: columns that there will be at most.
    """

    def __init__(self, rows: int, allocated: int) -> None:
        super().__init__(rows, 0)
        self._allocated = allocated

    def reach(self, columns: int) -> None:
        """Let the next passes read this many columns."""
        self.columns = columns

    def write(self, layer: int, rows: Tensor, columns: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [B, G, L, D] of these rows [B] at these columns [B, L]."""
        if layer == len(self._keys):
            shape = (self.rows, keys.shape[1], self._allocated, keys.shape[3])
            self._keys.append(keys.new_zeros(shape))
            self._values.append(values.new_zeros(shape))
        self._keys[layer][rows[:, None], :, columns] = keys.transpose(1, 2)
        self._values[layer][rows[:, None], :, columns] = values.transpose(1, 2)

    def read(self, layer: int, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys and values [R, G, S, D] of all rows, which a reading pass must take in order."""
        assert rows is None
        return self._keys[layer][:, :, : self.columns], self._values[layer][:, :, : self.columns]

    def keep(self, rows: Tensor) -> None:
        """Forget all other rows; these are numbered anew in their order, int64 [n]."""
        self._keys = [store[rows] for store in self._keys]
        self._values = [store[rows] for store in self._values]
        self.rows = len(rows)


def distinct(items: Any) -> tuple[list[int], list[int]]:
    """For each item the number of its first equal, and those numbers: (first [B], representatives [U])."""
    seen: dict[Any, int] = {}
    first = [seen.setdefault(item, number) for number, item in enumerate(items)]
    return first, list(seen.values())


def scatter_columns(target: Tensor, rows: Tensor, columns: Tensor, where: Tensor, values: Tensor) -> None:
    """target[rows[i], columns[i, j]] = values[i, j] where True; the rest of `target` stays."""
    picked, place = where.nonzero(as_tuple=True)
    target[rows[picked], columns[picked, place]] = values[picked, place].to(target.dtype)


def gather_columns(source: Tensor, start: Tensor, width: int, filler: int | float) -> Tensor:
    """[B, width] from [B, W]: each row from its own column on; `filler` past the last column."""
    columns = start[:, None] + torch.arange(width, device=source.device)
    inside = columns < source.shape[1]
    found = source.gather(1, columns.clamp_max(source.shape[1] - 1))
    return found.masked_fill(~inside, filler)
