"""Grade-school arithmetic: does the stated number equal the reference?"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from dare_lightning.rewards.base import Example, Verdict, judge_each
from dare_lightning.rewards.text import last_boxed, last_hash, last_tagged, numbers_in, single_number


class GSM8KReward:
    r"""`value` where the final number equals the reference exactly, else 0.

    Where the final number stands, first rule that applies (the last marker of its kind, anywhere in the text):

    1. `<answer>…</answer>`: a `\boxed{…}` or `#### …` inside it, or else its content.
    2. `#### …` to the end of its line: the line's only number, or else its first.
    3. `\boxed{…}`.
    4. With `last_number=True` only: the last number of the text.

    In 1 and 3 the content must state one number: several different ones are "unparsed", so a list of guesses earns
    nothing. Currency, separators, units and percent signs are read as `numbers_in` says.

    Args:
        value: reward of a right answer.
        last_number: read unmarked answers too; off, because any closing remark can then change the answer.
    """

    def __init__(self, value: float = 1.0, last_number: bool = False) -> None:
        self.value = value
        self.last_number = last_number

    def __call__(self, completions: Sequence[str], examples: Sequence[Example]) -> list[Verdict]:
        """One verdict for each completion."""
        return judge_each(self._judge, completions, examples, "the reference states no single number")

    def _judge(self, completion: str, example: Example) -> Verdict:
        gold = _reference(example.ground_truth)
        if gold is None:
            return Verdict(0.0, "excluded")
        answer, number = self._answer(completion)
        if number is None:
            return Verdict(0.0, "unparsed", answer)
        return Verdict(self.value, "right", answer) if number == gold else Verdict(0.0, "wrong", answer)

    def _answer(self, text: str) -> tuple[str | None, Fraction | None]:
        tagged = last_tagged(text)
        scope = text if tagged is None else tagged
        line, box = last_hash(scope), last_boxed(scope)
        if tagged is not None and box is not None:
            return box, single_number(box)
        if line is not None:
            return line, _number_of_line(line)
        if box is not None:
            return box, single_number(box)
        if tagged is not None:
            return tagged, single_number(tagged)
        numbers = numbers_in(text) if self.last_number else []
        return (str(numbers[-1]), numbers[-1]) if numbers else (None, None)


def _number_of_line(line: str) -> Fraction | None:
    number = single_number(line)
    return number if number is not None else next(iter(numbers_in(line)), None)


def _reference(ground_truth: str) -> Fraction | None:
    """The reference is a number, or a whole worked solution that ends in `#### number`."""
    return single_number(last_hash(ground_truth) or ground_truth)
