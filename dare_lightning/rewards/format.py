"""Does the completion keep the asked layout, whatever it answers?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, get_args

from dare_lightning.rewards.base import Example, Verdict, check_lengths

Check = Literal["strict", "lenient", "tags"]

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
_TAG = re.compile("|".join(TAGS))
_STRICT = "<reasoning>\n|\n</reasoning>\n<answer>\n|\n</answer>"


class FormatReward:
    r"""`value` times how far the completion follows `<reasoning>…</reasoning><answer>…</answer>`.

    Reasoning and answer may span lines, and a final newline may be there or not. "right" means full marks.

    Args:
        check: "strict": exactly the four tags, each on a line of its own, nothing before or after.
            "lenient": the completion starts with a reasoning block, an answer block follows, white space between
            them is free, text may follow.
            "tags": a quarter for each tag that occurs exactly once and on a line of its own; 0.002 less for each
            character after `</answer>` (one final newline is free), never below 0.
        value: reward of full marks.

    Source: Zhao et al. 2025 (d1), arXiv:2504.12216, format rewards. Deviations: their strict check needs the final
    newline, their lenient one reasoning on a single line, and their tag score counts what follows the answer twice, or
    the whole text where the final newline is missing.
    """

    def __init__(self, check: Check = "strict", value: float = 0.5) -> None:
        if check not in get_args(Check):
            raise ValueError(f"check={check!r} is not known; choose one of {', '.join(get_args(Check))}")
        self.check = check
        self.value = value

    def __call__(self, completions: Sequence[str], examples: Sequence[Example]) -> list[Verdict]:
        """One verdict for each completion; reward in [0, value]."""
        check_lengths(completions, examples)
        score = {"strict": strict_score, "lenient": lenient_score, "tags": tag_score}[self.check]
        marks = [score(completion) for completion in completions]
        return [Verdict(self.value * mark, "right" if mark == 1.0 else "wrong") for mark in marks]


def strict_score(text: str) -> float:
    """1 where the text is the exact layout, else 0."""
    text = text.removesuffix("\n")
    opening, middle, closing = _STRICT.split("|")
    if not (text.startswith(opening) and text.endswith(closing)) or _TAG.findall(text) != list(TAGS):
        return 0.0
    split = text.find(middle)
    fits = len(opening) <= split and split + len(middle) <= len(text) - len(closing)
    return 1.0 if fits else 0.0


def lenient_score(text: str) -> float:
    """1 where the text starts with a reasoning block that an answer block follows, else 0."""
    text = text.lstrip()
    reasoning_end = text.find(TAGS[1])
    if not text.startswith(TAGS[0]) or reasoning_end < 0:
        return 0.0
    rest = text[reasoning_end + len(TAGS[1]) :].lstrip()
    return 1.0 if rest.startswith(TAGS[2]) and TAGS[3] in rest else 0.0


def tag_score(text: str) -> float:
    """Share of the four tags in place, in [0, 1], less what follows the answer."""
    lines = text.split("\n")
    placed = sum(text.count(tag) == 1 and tag in lines for tag in TAGS)
    _, found, after = text.rpartition(TAGS[3])
    extra = len(after.removeprefix("\n")) if found else 0
    return max(0.0, placed / 4 - 0.002 * extra)
