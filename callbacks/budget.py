"""What a run costs, under the same names for every method, and a limit to it."""

from __future__ import annotations

import logging
from typing import Any

import lightning as L
import torch

from dare_lightning.callbacks.peak_memory import peak_memory, reset_peak
from dare_lightning.families.cost import Cost
from dare_lightning.methods.base import DiffusionPolicyModule
from dare_lightning.parallel.collectives import gather_objects, rank_and_world, sum_over_ranks

log = logging.getLogger(__name__)

TRAINING = ("old_policy", "reference", "update")
"""What forward passes of training are for."""
PURPOSES = ("rollout", *TRAINING)


class Budget(L.Callback):
    """Logs the cost of a run so far, and ends training when a budget is spent, so that methods compare at equal cost.

    Logged at the end of a rollout, and for methods on fixed data after an optimiser step, summed over ranks: `cost/`
    `rollout_passes`, `old_policy_passes`, `reference_passes`, `update_passes`, their sums `training_passes` (without
    the rollout) and `passes`, `tokens` (see `Cost`); and `peak_memory_mb` (see `peak_memory`), since the last rollout
    began on a GPU, of the rank that held the most. Held-out prompts and benchmarks are not counted. A resumed run goes
    on counting.

    A run ends with the rollout (on fixed data: the optimiser step) in which a limit is reached.

    Args:
        max_passes: limit of `cost/passes`; None for none.
        max_training_passes: limit of `cost/training_passes`; None for none.

    Raises:
        ValueError: a limit below 1.
    """

    def __init__(self, max_passes: int | None = None, max_training_passes: int | None = None) -> None:
        self.limits = {"passes": max_passes, "training_passes": max_training_passes}
        for name, limit in self.limits.items():
            if limit is not None and limit < 1:
                raise ValueError(f"budget.max_{name}={limit} must be at least 1, or null for no limit")
        self._cost = Cost()
        self._ended = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Find who counts.

        Raises:
            ValueError: the module is none of ours.
        """
        if not isinstance(pl_module, DiffusionPolicyModule):
            raise ValueError(f"a budget needs a DiffusionPolicyModule, found {type(pl_module).__name__}")
        self._cost = pl_module.cost

    def state_dict(self) -> dict[str, Any]:
        """The counts of all ranks together. All ranks call it together."""
        counts = gather_objects(
            {purpose: (self._cost.passes(purpose), self._cost.tokens(purpose)) for purpose in PURPOSES}
        )
        sums = {purpose: [sum(rank[purpose][i] for rank in counts) for i in (0, 1)] for purpose in PURPOSES}
        return {"spent": sums, "ended": self._ended}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there; the first rank takes over what all had counted."""
        first = rank_and_world()[0] == 0
        spent = {purpose: counts if first else [0, 0] for purpose, counts in state_dict["spent"].items()}
        self._cost.restore({p: counts[0] for p, counts in spent.items()}, {p: counts[1] for p, counts in spent.items()})
        self._ended = bool(state_dict["ended"])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Train no further where the run had ended, unless it was given more."""
        if self._ended:
            self._ended = self._reached(pl_module.device) is not None
            trainer.should_stop = self._ended

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """A rollout's peak is its own."""
        reset_peak(pl_module.device)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log on fixed data, and stop where the budget is spent: before the validation of this step or rollout."""
        assert isinstance(pl_module, DiffusionPolicyModule)  # `setup` has seen it
        last = batch_idx + 1 >= trainer.num_training_batches
        stepped = last or (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if not (last if pl_module.online else stepped):
            return
        if not pl_module.online:
            self._log(pl_module)
        if not self._ended and (reached := self._reached(pl_module.device)) is not None:
            self._ended = trainer.should_stop = True
            log.info("%s is spent: training ends here, at optimiser step %d", reached, trainer.global_step)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the rollout's cost with its other metrics."""
        assert isinstance(pl_module, DiffusionPolicyModule)
        if pl_module.online:
            self._log(pl_module)

    def _counts(self, device: torch.device) -> dict[str, int]:
        """What all ranks have spent, by the names it is logged under."""
        own = {f"{purpose}_passes": self._cost.passes(purpose) for purpose in PURPOSES}
        own["training_passes"] = self._cost.passes(*TRAINING)
        own["passes"] = self._cost.passes(*PURPOSES)
        own["tokens"] = self._cost.tokens(*PURPOSES)
        totals = sum_over_ranks(torch.tensor(list(own.values())), device).tolist()
        return dict(zip(own, totals, strict=True))

    def _reached(self, device: torch.device) -> str | None:
        """The limit that is reached, with what was spent; None where none is."""
        if all(limit is None for limit in self.limits.values()):
            return None
        counts = self._counts(device)
        for name, limit in self.limits.items():
            if limit is not None and counts[name] >= limit:
                return f"budget.max_{name}={limit} ({counts[name]} made)"
        return None

    def _log(self, module: L.LightningModule) -> None:
        values: dict[str, float] = dict(self._counts(module.device))
        values["peak_memory_mb"] = max(gather_objects(peak_memory(module.device)))
        for name, value in values.items():
            module.log(f"cost/{name}", float(value), rank_zero_only=False)
