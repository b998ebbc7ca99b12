"""Countdown: reach a target with the given numbers, each used once."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from dare_lightning.rewards.base import Example, Form, Verdict, check_form, judge_each, sample_name
from dare_lightning.rewards.text import stated

MAX_LENGTH = 256
MAX_DEPTH = 32
_TOKEN = re.compile(r"\s*(?:(?P<number>0|[1-9][0-9]{0,11})(?![0-9])|(?P<symbol>[-+*/()]))", re.ASCII)


class ExpressionError(ValueError):
    """The text is not an arithmetic expression of the accepted grammar, or it has no value."""


class CountdownReward:
    """1.0 for an expression that uses the numbers once each and hits the target, 0.1 for the right numbers alone.

    `extra["numbers"]` holds the numbers (a list, or the JSON text of one), the ground truth the target. The
    expression is evaluated exactly, in fractions, by a parser that knows nothing but integers, `+ - * /`,
    parentheses and the minus sign before an operand. Whatever else stands in it, `=` included, scores 0.

    Args:
        form: where the answer stands: "paper" in the last `<answer>…</answer>`, "compact" the completion is the answer.

    Source: Zhao et al. 2025 (d1), arXiv:2504.12216, Countdown reward. Their code also pays 0.1 for an answer with
    wrong numbers or one that is no expression; the paper's text does not, and neither do we.
    """

    def __init__(self, form: Form = "paper") -> None:
        check_form(form)
        self.form: Form = form

    def __call__(self, completions: Sequence[str], examples: Sequence[Example]) -> list[Verdict]:
        """One verdict for each completion; reward 0, 0.1 or 1.

        Raises:
            ValueError: an example has no `extra["numbers"]`, or the lengths differ.
        """
        return judge_each(self._judge, completions, examples, "the numbers or the target are not integers")

    def _judge(self, completion: str, example: Example) -> Verdict:
        task = _task(example)
        if task is None:
            return Verdict(0.0, "excluded")
        numbers, target = task
        answer = stated(completion, self.form)
        if not answer:
            return Verdict(0.0, "unparsed", answer)
        try:
            tokens = tokenize(answer)
            if sorted(int(token) for token in tokens if token.isdigit()) != sorted(numbers):
                return Verdict(0.0, "wrong", answer)
            value = evaluate(tokens)
        except ZeroDivisionError:
            return Verdict(0.1, "wrong", answer)
        except ExpressionError:
            return Verdict(0.0, "wrong", answer[:MAX_LENGTH])
        return Verdict(1.0, "right", answer) if value == target else Verdict(0.1, "wrong", answer)


def tokenize(text: str) -> list[str]:
    """Split an expression into integers and the symbols `+ - * / ( )`; ASCII only, no leading zeros.

    Raises:
        ExpressionError: another character, `**`, `//`, an integer of more than 12 digits, or more than MAX_LENGTH
            characters.
    """
    text = text.strip()
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"{len(text)} characters; at most {MAX_LENGTH} are read")
    tokens: list[str] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ExpressionError(f"unexpected {text[position : position + 8]!r} at {position}")
        tokens.append(match["number"] or match["symbol"])
        position = match.end()
    return tokens


def evaluate(tokens: Sequence[str]) -> Fraction:
    """Exact value of a tokenized expression, by recursive descent; usual precedence, left to right.

    Raises:
        ExpressionError: the tokens form no expression, or nest deeper than MAX_DEPTH.
        ZeroDivisionError: the expression divides by zero.
    """
    value, position = _sum(tokens, 0, 0)
    if position < len(tokens):
        raise ExpressionError(f"unexpected {tokens[position]!r} after the expression")
    return value


def _sum(tokens: Sequence[str], position: int, depth: int) -> tuple[Fraction, int]:
    value, position = _product(tokens, position, depth)
    while position < len(tokens) and tokens[position] in "+-":
        other, after = _product(tokens, position + 1, depth)
        value = value + other if tokens[position] == "+" else value - other
        position = after
    return value, position


def _product(tokens: Sequence[str], position: int, depth: int) -> tuple[Fraction, int]:
    value, position = _operand(tokens, position, depth)
    while position < len(tokens) and tokens[position] in "*/":
        other, after = _operand(tokens, position + 1, depth)
        value = value * other if tokens[position] == "*" else value / other
        position = after
    return value, position


def _operand(tokens: Sequence[str], position: int, depth: int) -> tuple[Fraction, int]:
    if depth > MAX_DEPTH:
        raise ExpressionError(f"nested deeper than {MAX_DEPTH}")
    if position >= len(tokens):
        raise ExpressionError("the expression ends where a number should stand")
    token = tokens[position]
    if token.isdigit():
        return Fraction(int(token)), position + 1
    if token == "-":
        value, position = _operand(tokens, position + 1, depth + 1)
        return -value, position
    if token != "(":
        raise ExpressionError(f"unexpected {token!r}")
    value, position = _sum(tokens, position + 1, depth + 1)
    if position >= len(tokens) or tokens[position] != ")":
        raise ExpressionError("a parenthesis is not closed")
    return value, position + 1


def _task(example: Example) -> tuple[list[int], int] | None:
    """Numbers and target; None where they cannot be read."""
    if "numbers" not in example.extra:
        raise ValueError(
            f"{sample_name(example)} has no extra['numbers'] (found {sorted(example.extra)}): this reward needs "
            "Countdown rows; choose the reward that belongs to the data"
        )
    raw: Any = example.extra["numbers"]
    try:
        numbers = [int(number) for number in (json.loads(raw) if isinstance(raw, str) else raw)]
        target = int(example.ground_truth)
    except (ValueError, TypeError):
        return None
    return (numbers, target) if numbers and min(numbers) >= 0 else None
