"""What every forward pass read and proposed, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass
class Trajectory:
    """The passes of B rows, padded behind each row's last: int64 [B, T, G] twice and float32 [B, T, G]."""

    states: Tensor
    proposals: Tensor
    confidence: Tensor

    @classmethod
    def joined(cls, parts: Sequence[Trajectory], rows: Tensor) -> Trajectory:
        """One trajectory of all parts, then these of its rows."""
        longest = max(part.states.shape[1] for part in parts)

        def column(values: Sequence[Tensor]) -> Tensor:
            return torch.cat([pad(value, (0, 0, 0, longest - value.shape[1])) for value in values])[rows]

        return cls(
            column([part.states for part in parts]),
            column([part.proposals for part in parts]),
            column([part.confidence for part in parts]),
        )


@dataclass
class History:
    """Keeps the passes of each row, on the CPU."""

    passes: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = field(default_factory=dict)

    def record(self, rows: Tensor, states: Tensor, proposals: Tensor, confidence: Tensor) -> None:
        """One pass of these rows, [n, G] each."""
        columns = (states.to("cpu", torch.int32), proposals.to("cpu", torch.int32), confidence.to("cpu", torch.float32))
        for row, pass_ in zip(rows.tolist(), zip(*columns, strict=True), strict=True):
            self.passes.setdefault(row, []).append(pass_)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Rows `target` have made the passes of rows `source`."""
        for one, other in zip(source.tolist(), target.tolist(), strict=True):
            self.passes[other] = list(self.passes.get(one, []))

    def trajectory(self, count: int, width: int) -> Trajectory:
        """The passes of rows 0 to `count` - 1; 0 behind each row's last."""
        longest = max((len(passes) for passes in self.passes.values()), default=0)
        shape = (count, longest, width)
        found = Trajectory(
            torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        )
        for row, passes in self.passes.items():
            for step, (states, proposals, confidence) in enumerate(passes):
                found.states[row, step] = states
                found.proposals[row, step] = proposals
                found.confidence[row, step] = confidence
        return found
