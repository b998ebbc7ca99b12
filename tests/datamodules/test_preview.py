"""The text of `preview`: the supervised part marked, lengths, what was dropped and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from dare_lightning.datamodules.chat import encode_dialogue, encode_prompt
from dare_lightning.datamodules.preview import Shown, render_preview, shown_dialogue, shown_prompt
from dare_lightning.rewards.base import Example
from tests.tiny import EOS, tiny_tokenizer

CHAT = [{"role": "user", "content": "[b]sum[/b] 50%?"}, {"role": "assistant", "content": "four"}]


def printed(shown: Sequence[Shown], **parts: Any) -> str:
    console = Console(width=100, record=True, file=None, quiet=False, no_color=True)
    with console.capture() as capture:
        defaults = {"lengths": {"prompt": [1, 2, 30]}, "layout": "messages", "dropped": {}}
        console.print(render_preview(tiny_tokenizer(110), shown, **defaults | parts))
    return capture.get()


def test_the_supervised_part_is_marked_without_colours() -> None:
    text = printed([shown_dialogue(encode_dialogue(tiny_tokenizer(110), CHAT, 100, EOS), 3)])
    assert "assistant:⟦four<|eot_id|><|endoftext|>⟧" in text
    assert "row 3" in text
    assert "6 supervised" in text


def test_square_brackets_of_the_data_are_shown_as_they_are() -> None:
    assert "[b]sum[/b] 50%?" in printed([shown_dialogue(encode_dialogue(tiny_tokenizer(110), CHAT, 100), 0)])


def test_a_cut_answer_is_called_so() -> None:
    tokenizer = tiny_tokenizer(110)
    limit = len(encode_prompt(tokenizer, CHAT[:1])) + 2
    text = printed([shown_dialogue(encode_dialogue(tokenizer, CHAT, limit), 0)])
    assert "⟦fo⟧" in text
    assert "cut at max_length" in text


def test_a_prompt_is_shown_with_its_ground_truth_and_no_mark() -> None:
    example = Example(CHAT[:1], "4", source="sums", index=9)
    text = printed([shown_prompt(example, encode_prompt(tiny_tokenizer(110), example.messages))])
    assert "ground truth: 4" in text
    assert "row 9 of sums" in text
    assert "⟦" not in text


def test_lengths_layout_and_drops_are_told() -> None:
    lengths = {"prompt": list(range(1, 101)), "answer": []}
    text = printed([], lengths=lengths, layout="verl", dropped={"no answer": 3, "no prompt": 1}, source="x.parquet")
    (row,) = [line for line in text.splitlines() if "prompt" in line and "100" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["prompt", "100", "1", "50", "90", "99", "100"]
    assert "layout: verl, from x.parquet" in text
    assert "dropped: 3 rows, no answer" in text
    assert "dropped: 1 rows, no prompt" in text
    assert "dropped: none" in printed([])
