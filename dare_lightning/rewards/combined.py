"""Several rewards as one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dare_lightning.rewards.base import Example, Reward, Status, Verdict, check_lengths


class WeightedSum:
    """Weighted sum of named rewards; `parts` keeps each one apart, before weighting, for the logs.

    A part that is itself a sum appears as `name` and `name/part`. Where a reward of non-zero weight excludes a
    sample, the sum excludes it too and is 0.

    Args:
        rewards: the rewards, by the name they are logged under.
        weights: finite factor of each; the same names.
        solved_by: the reward whose status and answer the sum takes over; None: "right" where all are right, else the
            first other status.

    Raises:
        ValueError: no rewards, names that do not match, a weight that is not finite, an unknown `solved_by`.
    """

    def __init__(
        self, rewards: Mapping[str, Reward], weights: Mapping[str, float], solved_by: str | None = None
    ) -> None:
        if not rewards:
            raise ValueError("a weighted sum needs at least one reward")
        if rewards.keys() != weights.keys():
            raise ValueError(f"rewards {sorted(rewards)} and weights {sorted(weights)} must have the same names")
        for name, weight in weights.items():
            if not math.isfinite(weight):
                raise ValueError(f"weight {name}={weight} is not finite")
        if solved_by is not None and solved_by not in rewards:
            raise ValueError(f"solved_by={solved_by!r} is none of the rewards {sorted(rewards)}")
        self.rewards = dict(rewards)
        self.weights = dict(weights)
        self.solved_by = solved_by

    def __call__(self, completions: Sequence[str], examples: Sequence[Example]) -> list[Verdict]:
        """One verdict for each completion."""
        check_lengths(completions, examples)
        columns = {name: reward(completions, examples) for name, reward in self.rewards.items()}
        return [self._sum({name: column[row] for name, column in columns.items()}) for row in range(len(completions))]

    def _sum(self, verdicts: Mapping[str, Verdict]) -> Verdict:
        parts: dict[str, float] = {}
        for name, verdict in verdicts.items():
            parts[name] = verdict.reward
            parts.update({f"{name}/{part}": value for part, value in verdict.parts.items()})
        answers = [verdict.answer for verdict in verdicts.values() if verdict.answer is not None]
        answer = verdicts[self.solved_by].answer if self.solved_by is not None else next(iter(answers), None)
        if any(verdict.status == "excluded" and self.weights[name] != 0 for name, verdict in verdicts.items()):
            return Verdict(0.0, "excluded", answer, parts)
        total = math.fsum(self.weights[name] * verdict.reward for name, verdict in verdicts.items())
        return Verdict(total, self._status(verdicts), answer, parts)

    def _status(self, verdicts: Mapping[str, Verdict]) -> Status:
        if self.solved_by is not None:
            return verdicts[self.solved_by].status
        return next((verdict.status for verdict in verdicts.values() if verdict.status != "right"), "right")
