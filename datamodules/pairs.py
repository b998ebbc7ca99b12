"""What the columns of a preference data set mean: a prompt, the answer that was preferred, and the other one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

from dare_lightning.datamodules.readers import Cell, Dialogue
from dare_lightning.datamodules.sources import RowTable

PairLayout = Literal["verl", "ultrafeedback", "trl", "trl_implicit_prompt"]

PAIR_LAYOUTS: dict[PairLayout, tuple[str, ...]] = {
    "verl": ("prompt", "extra_info"),
    "ultrafeedback": ("prompt", "chosen", "rejected", "score_chosen", "score_rejected"),
    "trl": ("prompt", "chosen", "rejected"),
    "trl_implicit_prompt": ("chosen", "rejected"),
}
"""Layout -> the columns it must have; the first that fits wins."""

NO_PROMPT = "no prompt"
NO_ANSWER = "no answer"
EQUAL_ANSWERS = "equal answers"
OTHER_PROMPTS = "the two answers have different prompts"
CONTRADICTED = "scores do not prefer the chosen answer by min_margin"

Turns = list[dict[str, str]]


@dataclass(frozen=True)
class Preference(Dialogue):
    """The preferred conversation, and another one that begins with the same `context` messages.

    Attributes:
        rejected: the other conversation, prompt included.
    """

    rejected: Sequence[Mapping[str, str]] = ()


def recognise_pair_layout(columns: Sequence[str]) -> PairLayout:
    """The layout whose columns are all there; rows of the verl layout hold both answers in `extra_info`.

    Raises:
        ValueError: none is.
    """
    for layout, needed in PAIR_LAYOUTS.items():
        # With answers in columns of their own, an extra_info beside them is just another column.
        if set(needed) <= set(columns) and not (layout == "verl" and "chosen" in columns):
            return layout
    accepted = "; ".join(f"{layout}: {', '.join(needed)}" for layout, needed in PAIR_LAYOUTS.items())
    raise ValueError(f"columns {sorted(columns)} hold no preference pairs; rename them to one of: {accepted}")


def to_preferences(table: RowTable, dropped: Counter[str], min_margin: float = 0.0) -> list[Preference]:
    """Pairs whose answers differ.

    Answers are texts or lists of messages; lists may repeat the prompt, and without a column `prompt` what both have
    in common is the prompt. In the verl layout `extra_info` holds `chosen` and `rejected`.

    Args:
        dropped: counts the rows that were left out, by reason.
        min_margin: least difference of the scores of a row that has them (`score_chosen`, `score_rejected`).

    Raises:
        ValueError: unknown columns, or a value of the wrong type, named with its file and row.
    """
    layout = recognise_pair_layout(table.columns)
    found = []
    for number, row in enumerate(table.rows):
        cell = Cell(row, table, number)
        pair = _pair(cell, layout, min_margin)
        if isinstance(pair, str):
            dropped[pair] += 1
        else:
            found.append(pair)
    return found


def _pair(cell: Cell, layout: PairLayout, min_margin: float) -> Preference | str:
    """The pair of a row, or why it has none."""
    answers = Cell(cell.mapping("extra_info"), cell.table, cell.number) if layout == "verl" else cell
    chosen, rejected = answers.turns("chosen", "assistant"), answers.turns("rejected", "assistant")
    if not _answers(chosen) or not _answers(rejected):
        return NO_ANSWER
    prompt = _prompt(cell, layout, (chosen, rejected))
    if prompt is None:
        return OTHER_PROMPTS
    if not any(turn["content"].strip() for turn in prompt if turn["role"] == "user"):
        return NO_PROMPT
    ends = [_after(prompt, turns) for turns in (chosen, rejected)]
    if ends[0] is None or ends[1] is None:
        return OTHER_PROMPTS
    if _words(ends[0]) == _words(ends[1]):
        return EQUAL_ANSWERS
    margin = _margin(answers)
    if margin is not None and margin < min_margin:
        return CONTRADICTED
    source = cell.row.get("data_source") or cell.row.get("source")
    name = source if isinstance(source, str) else cell.table.file(cell.number)[0]
    return Preference([*prompt, *ends[0]], len(prompt), name, cell.number, rejected=[*prompt, *ends[1]])


def _answers(turns: Turns) -> bool:
    return bool(turns) and turns[-1]["role"] == "assistant" and bool(turns[-1]["content"].strip())


def _prompt(cell: Cell, layout: PairLayout, answers: tuple[Turns, Turns]) -> Turns | None:
    """What comes before both answers; None where they contradict each other or the prompt column."""
    whole = [turns[0]["role"] != "assistant" for turns in answers]
    if whole[0] != whole[1]:
        return None
    given = [] if layout == "trl_implicit_prompt" else cell.turns("prompt", "user")
    if not whole[0]:
        return given
    same = takewhile(lambda pair: pair[0] == pair[1], zip(answers[0][:-1], answers[1][:-1], strict=False))
    shared = [turn for turn, _ in same]
    while shared and shared[-1]["role"] == "assistant":
        shared.pop()
    texts = [turn["content"].strip() for turn in given if turn["role"] == "user"]
    repeated = [turn["content"].strip() for turn in shared if turn["role"] == "user"]
    return shared if not texts or texts[-1] in repeated else None


def _after(prompt: Turns, turns: Turns) -> Turns | None:
    """The turns behind the prompt, which the list may repeat; None where it begins otherwise."""
    if turns[0]["role"] == "assistant":
        return turns
    return turns[len(prompt) :] if turns[: len(prompt)] == prompt and len(turns) > len(prompt) else None


def _words(turns: Turns) -> list[tuple[str, str]]:
    return [(turn["role"], turn["content"].strip()) for turn in turns]


def _margin(cell: Cell) -> float | None:
    scores: list[Any] = [cell.row.get("score_chosen"), cell.row.get("score_rejected")]
    for key, value in zip(("score_chosen", "score_rejected"), scores, strict=True):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise cell.wrong(key, value, "a number")
    return None if None in scores else float(scores[0]) - float(scores[1])
