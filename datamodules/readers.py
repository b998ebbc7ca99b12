"""What the columns of a data set mean: prompts with reference answers, or whole conversations."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dare_lightning.datamodules.sources import RowTable, read_rows
from dare_lightning.rewards.base import Example

log = logging.getLogger(__name__)

Layout = Literal["verl", "prompt_completion", "messages", "alpaca", "sharegpt", "prompt"]

LAYOUTS: dict[Layout, tuple[str, ...]] = {
    "verl": ("prompt", "reward_model", "extra_info"),
    "prompt_completion": ("prompt", "completion"),
    "messages": ("messages",),
    "alpaca": ("instruction", "output"),
    "sharegpt": ("conversations",),
    "prompt": ("prompt",),
}
"""Layout -> the columns it must have; the first that fits wins."""

_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
}
_TRUTH_COLUMNS = ("ground_truth", "solution", "answer")


@dataclass(frozen=True)
class Dialogue:
    """A conversation to learn from.

    Attributes:
        messages: `{"role": ..., "content": ...}` each; the last one is a non-empty answer of the assistant.
        context: how many of the first messages are given; answers among them are not taught.
        source: data set name or file.
        index: row number in its source, from 0.
    """

    messages: Sequence[Mapping[str, str]]
    context: int = 0
    source: str = ""
    index: int = 0


def recognise_layout(columns: Sequence[str]) -> Layout:
    """The layout whose columns are all there.

    Raises:
        ValueError: none is, or the rows are preference pairs.
    """
    if "chosen" in columns and "rejected" in columns:
        raise ValueError(
            f"columns {sorted(columns)} hold preference pairs; they are read by data=preference, with method=vrpo"
        )
    for layout, needed in LAYOUTS.items():
        if set(needed) <= set(columns):
            return layout
    accepted = "; ".join(f"{layout}: {', '.join(needed)}" for layout, needed in LAYOUTS.items())
    raise ValueError(f"columns {sorted(columns)} fit no known layout; rename them to one of: {accepted}")


def to_examples(table: RowTable, dropped: Counter[str] | None = None) -> list[Example]:
    """Prompts with their reference answers.

    The ground truth is verl's `reward_model.ground_truth`; else a column `ground_truth`, `solution` or `answer`;
    else the row's own answer. It is "" where the data set has none at all; a row that lacks it alone is dropped.
    All other columns are in `extra`.

    Args:
        dropped: counts the rows that were left out, by reason.

    Raises:
        ValueError: unknown columns, or a value of the wrong type, named with its file and row.
    """
    layout = recognise_layout(table.columns)
    examples = []
    for number, row in enumerate(table.rows):
        cell = Cell(row, table, number)
        turns, context = _conversation(cell, layout, learn=False)
        last = _last_answer(turns, context)
        prompt = turns[: context or last]
        if not _asks(prompt):
            _count(dropped, "no prompt")
            continue
        truth = _ground_truth(cell, layout, "" if last is None else turns[last]["content"])
        if truth is None:
            _count(dropped, "no ground truth")
            continue
        columns = cell.mapping("extra_info") if layout == "verl" else row
        extra = {key: value for key, value in columns.items() if value is not None and key not in LAYOUTS[layout]}
        examples.append(Example(prompt, truth, extra, _source(cell), number))
    return examples


def read_examples(
    path: str, split: str | None = None, limit: int | None = None, dropped: Counter[str] | None = None
) -> list[Example]:
    """`to_examples` of `read_rows`; what was dropped is logged too."""
    counted: Counter[str] = Counter()
    examples = to_examples(read_rows(path, split, limit), counted)
    for reason, count in sorted(counted.items()):
        log.warning("%s: %d rows dropped: %s", path, count, reason)
    if dropped is not None:
        dropped.update(counted)
    return examples


def to_dialogues(table: RowTable, dropped: Counter[str] | None = None) -> list[Dialogue]:
    """Conversations that end in an answer of the assistant; what follows the last one is cut off.

    In the verl layout the answer is `extra_info.answer` and the question `extra_info.question`, or `prompt` where
    there is no such entry.

    Args:
        dropped: counts the rows that were left out, by reason.

    Raises:
        ValueError: unknown columns, or a value of the wrong type, named with its file and row.
    """
    layout = recognise_layout(table.columns)
    dialogues = []
    for number, row in enumerate(table.rows):
        cell = Cell(row, table, number)
        turns, context = _conversation(cell, layout, learn=True)
        last = _last_answer(turns, context)
        if last is None:
            _count(dropped, "no answer")
        elif not _asks(turns[:last]):
            _count(dropped, "no prompt")
        else:
            dialogues.append(Dialogue(turns[: last + 1], context, _source(cell), number))
    return dialogues


# What a row says.


@dataclass(frozen=True)
class Cell:
    """A row whose values are checked when they are read; every reader raises `wrong` for another type."""

    row: Mapping[str, Any]
    table: RowTable
    number: int

    def wrong(self, key: str, value: Any, expected: str) -> ValueError:
        """The error that names the place, what is there and what was expected."""
        shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
        return ValueError(
            f"{self.table.where(self.number)}: {key} is {shown} ({type(value).__name__}), expected {expected}"
        )

    def text(self, key: str, value: Any) -> str:
        """A text; None reads as ""."""
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.wrong(key, value, "text")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        """A mapping; None reads as an empty one."""
        value = self.row.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.wrong(key, value, "a mapping")
        return value

    def messages(self, key: str, role_key: str = "role", text_key: str = "content") -> list[dict[str, str]]:
        """A list of turns; None reads as no turn."""
        value = self.row.get(key)
        if value is None:
            return []
        if not isinstance(value, (list, tuple)):
            raise self.wrong(key, value, f"a list of {{{role_key}, {text_key}}}")
        turns = []
        for place, turn in enumerate(value):
            name = f"{key}[{place}]"
            if not isinstance(turn, Mapping):
                raise self.wrong(name, turn, f"a mapping with {role_key} and {text_key}")
            role = turn.get(role_key)
            if not isinstance(role, str) or role not in _ROLES:
                raise self.wrong(f"{name}.{role_key}", role, f"one of {', '.join(_ROLES)}")
            content = self.text(f"{name}.{text_key}", turn.get(text_key))
            turns.append({"role": _ROLES[role], "content": content})
        return turns

    def turns(self, key: str, role: str) -> list[dict[str, str]]:
        """Turns given as a plain text of one role, or as a list of messages."""
        value = self.row.get(key)
        if isinstance(value, str):
            return [{"role": role, "content": value}]
        return self.messages(key)


def _conversation(cell: Cell, layout: Layout, learn: bool) -> tuple[list[dict[str, str]], int]:
    """A row's turns, and how many of the first ones are given and not written by the policy.

    In conversations (messages, ShareGPT) that is 0, every answer counts; elsewhere the columns say what is given.
    """
    row = cell.row
    if layout == "messages":
        return cell.messages("messages"), 0
    if layout == "sharegpt":
        system = cell.text("system", row.get("system"))
        head = [{"role": "system", "content": system}] if system.strip() else []
        return [*head, *cell.messages("conversations", "from", "value")], 0
    if layout == "alpaca":
        system = cell.text("system", row.get("system"))
        head = [{"role": "system", "content": system}] if system.strip() else []
        task, given = cell.text("instruction", row.get("instruction")), cell.text("input", row.get("input"))
        prompt = [*head, {"role": "user", "content": f"{task}\n\n{given}" if given.strip() else task}]
        answer = [{"role": "assistant", "content": cell.text("output", row.get("output"))}]
    elif layout == "verl" and learn:
        extra = cell.mapping("extra_info")
        question = cell.text("extra_info.question", extra.get("question"))
        prompt = [{"role": "user", "content": question}] if question else cell.turns("prompt", "user")
        answer = [{"role": "assistant", "content": cell.text("extra_info.answer", extra.get("answer"))}]
    else:
        prompt = cell.turns("prompt", "user")
        answer = cell.turns("completion", "assistant") if layout == "prompt_completion" else []
    return [*prompt, *answer], len(prompt)


def _last_answer(turns: Sequence[Mapping[str, str]], context: int) -> int | None:
    """Position of the last answer behind the context that is not empty."""
    places = range(len(turns) - 1, context - 1, -1)
    return next((n for n in places if turns[n]["role"] == "assistant" and turns[n]["content"].strip()), None)


def _asks(turns: Sequence[Mapping[str, str]]) -> bool:
    return any(turn["content"].strip() for turn in turns if turn["role"] == "user")


def _ground_truth(cell: Cell, layout: Layout, answer: str) -> str | None:
    """The reference answer, "" where the layout has no place for one, None where that place is empty."""
    if layout == "verl":
        name, value = "reward_model.ground_truth", cell.mapping("reward_model").get("ground_truth")
    else:
        name = next((column for column in _TRUTH_COLUMNS if column in cell.table.columns), "")
        if not name:
            return answer
        value = cell.row.get(name)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    return cell.text(name, value) or None


def _source(cell: Cell) -> str:
    named = cell.row.get("data_source")
    return named if isinstance(named, str) else Path(cell.table.file(cell.number)[0]).name


def _count(dropped: Counter[str] | None, reason: str) -> None:
    if dropped is not None:
        dropped[reason] += 1
