"""What the micro-batches of one optimiser step say, as quotients over all of them and all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from dare_lightning.diffusion.diagnostics import EntropySum, Metrics, derived, estimator_spread
from dare_lightning.parallel.collectives import gather_objects


class MicroBatchMetrics:
    """What the parts of one micro-batch say: the method's own metrics, and those that all methods have.

    Attributes:
        entropy: of the policy where it is scored.
    """

    def __init__(self) -> None:
        self.entropy = EntropySum()
        self._own: Metrics = {}
        self._draws: list[Tensor] = []

    def note(self, metrics: Metrics, draws: Tensor | None = None) -> None:
        """Add a part's sums and weights, and the Monte Carlo draws [B, n] of its rows."""
        for name, (total, weight) in metrics.items():
            known = self._own.get(name, (torch.zeros_like(total), torch.zeros_like(weight)))
            self._own[name] = (known[0] + total.detach(), known[1] + weight.detach())
        if draws is not None:
            self._draws.append(draws.detach())

    def sums(self, length: Tensor) -> Metrics:
        """All of it; `length` int64 [B], the tokens that count of each sample that was run, else 0."""
        spread = estimator_spread(torch.cat(self._draws, 1), length) if self._draws else {}
        return self._own | spread | self.entropy.metrics()


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

    def values(self) -> dict[str, Tensor]:
        """The step's values, float64, and what follows from them; then begin anew. Every rank must call it.

        What had no weight on any rank has no value: in a step that runs no sample there is no ratio.
        """
        # One copy from the device for all of them.
        pairs = [torch.stack(pair).double() for pair in self._pairs.values()]
        own = dict(zip(self._pairs, torch.stack(pairs).tolist() if pairs else [], strict=True))
        self._pairs.clear()
        # By name: a rank whose samples were all left out measures less than the others. A mean of the ranks' quotients
        # would weigh their samples differently.
        summed: dict[str, tuple[float, float]] = {}
        for of_rank in gather_objects(own):
            for name, (total, weight) in of_rank.items():
                known = summed.get(name, (0.0, 0.0))
                summed[name] = known[0] + total, known[1] + weight
        named = {
            name: torch.tensor(total / weight, dtype=torch.float64)
            for name, (total, weight) in summed.items()
            if weight > 0
        }
        return named | derived(named)
