"""What a reward reads and what it says."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

_log = logging.getLogger(__name__)

Status = Literal["right", "wrong", "unparsed", "timeout", "excluded"]
Form = Literal["paper", "compact"]
"""How a planning task is asked: in the paper's words, with the answer in tags, or bare, for tiny models."""


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


def sample_name(example: Example) -> str:
    """How messages name a sample: `gsm8k[17]`."""
    return f"{example.source or 'sample'}[{example.index}]"


def report_excluded(verdicts: Sequence[Verdict], examples: Sequence[Example], problem: str) -> None:
    """Log, once a batch, which samples were excluded because their reference cannot be read."""
    pairs = zip(verdicts, examples, strict=True)
    names = list(dict.fromkeys(sample_name(example) for verdict, example in pairs if verdict.status == "excluded"))
    if names:
        more = f" and {len(names) - 20} more" if len(names) > 20 else ""
        _log.warning("%d samples excluded, %s: %s%s", len(names), problem, ", ".join(names[:20]), more)


def check_lengths(completions: Sequence[str], examples: Sequence[Example]) -> None:
    """Refuse a batch whose completions and examples do not pair up.

    Raises:
        ValueError: the lengths differ.
    """
    if len(completions) != len(examples):
        raise ValueError(
            f"{len(completions)} completions for {len(examples)} examples: pass one example for each completion "
            "(repeat the prompt's example for every member of its group)"
        )


def check_form(form: str) -> None:
    """Raise ValueError where a planning task has no such form."""
    if form not in get_args(Form):
        raise ValueError(f"form={form!r} is not known; choose one of {', '.join(get_args(Form))}")


def judge_each(
    judge: Callable[[str, Example], Verdict], completions: Sequence[str], examples: Sequence[Example], problem: str
) -> list[Verdict]:
    """One verdict for each completion, judged by itself; excluded samples are logged once.

    Args:
        judge: completion, its example -> verdict.
        completions, examples: one of each a sample.
        problem: what it means that a sample is excluded.

    Raises:
        ValueError: the lengths differ.
    """
    check_lengths(completions, examples)
    verdicts = [judge(completion, example) for completion, example in zip(completions, examples, strict=True)]
    report_excluded(verdicts, examples, problem)
    return verdicts
