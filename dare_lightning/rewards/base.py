"""What a reward reads and what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Status = Literal["right", "wrong", "unparsed", "timeout", "excluded"]


@dataclass(frozen=True)
class Example:
    """One task: what the policy is asked, and what a verifier needs to judge the answer.

    Attributes:
        messages: the conversation so far, `{"role": ..., "content": ...}` each, last one from the user.
        ground_truth: the reference answer; "" where a task has none.
        extra: what else the verifier reads (`puzzle`, `numbers`, `tests`, ...).
        source: data set name.
        index: row number in its source.
    """

    messages: Sequence[Mapping[str, str]]
    ground_truth: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    index: int = 0


@dataclass(frozen=True)
class Verdict:
    """A completion's score.

    Attributes:
        reward: finite float.
        status: "right" (fully correct), "wrong", "unparsed" (no answer found), "timeout" (the check was cut off),
            "excluded" (the reference itself cannot be read; never rewarded).
        answer: what was extracted, for the samples table.
        parts: the named components of a combined reward.
    """

    reward: float
    status: Status
    answer: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


class Reward(Protocol):
    """Scores completions. Text is decoded up to the first end token: nothing after it can change a score."""

    def __call__(self, completions: Sequence[str], examples: Sequence[Example]) -> list[Verdict]:
        """One verdict for each completion, in order."""
        ...
