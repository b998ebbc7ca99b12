"""What the micro-batches of one optimiser step say, as quotients over all of them and all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from dare_lightning.diffusion.diagnostics import Metrics, derived
from dare_lightning.parallel.collectives import sum_over_ranks


class StepMetrics:
    """Sums and weights since the last optimiser step."""

    def __init__(self) -> None:
        self._pairs: dict[str, list[Tensor]] = {}

    def note(self, metrics: Metrics, add: bool = False) -> None:
        """Add a micro-batch's pairs.

        Args:
            add: the values are shares of one sum: its weight stays that of one, however many micro-batches bring one.
        """
        for name, (total, weight) in metrics.items():
            known = self._pairs.setdefault(name, [torch.zeros_like(total), torch.zeros_like(weight)])
            known[0] += total
            known[1] = weight if add else known[1] + weight

    def values(self, device: torch.device) -> dict[str, Tensor]:
        """The step's values, and what follows from them; then begin anew. Every rank must call it."""
        if not self._pairs:
            return {}
        # One message for all of them; a mean of the ranks' quotients would weigh their samples differently.
        pairs = torch.stack([torch.stack(pair).double() for pair in self._pairs.values()])
        totals, weights = sum_over_ranks(pairs, device).unbind(1)
        values = totals / weights.clamp_min(torch.finfo(weights.dtype).tiny)
        named = dict(zip(self._pairs, values, strict=True))
        self._pairs.clear()
        return named | derived(named)
