"""The text of `preview`: the supervised part marked, lengths, what was dropped and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console, RenderableType

from dare_lightning.datamodules.chat import encode_dialogue, encode_prompt
from dare_lightning.datamodules.preview import (
    Shown,
    preview_dialogues,
    preview_prompts,
    render_preview,
    shown_dialogue,
    shown_prompt,
)
from dare_lightning.datamodules.sft import SFTDataModule
from dare_lightning.evaluation.benchmarks.sudoku import SudokuTask
from dare_lightning.rewards.base import Example
from tests.tiny import EOS, tiny_llada, tiny_tokenizer

CHAT = [{"role": "user", "content": "[b]sum[/b] 50%?"}, {"role": "assistant", "content": "four"}]


def on_paper(renderable: RenderableType) -> str:
    console = Console(width=100, no_color=True)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def printed(shown: Sequence[Shown], **parts: Any) -> str:
    defaults = {"lengths": {"prompt": [1, 2, 30]}, "layout": "messages", "dropped": {}}
    return on_paper(render_preview(tiny_tokenizer(110), shown, **defaults | parts))


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


def test_a_fine_tuning_data_set_shows_the_samples_it_trains_on_first() -> None:
    data = SFTDataModule(tiny_llada(vocab=110), task=SudokuTask(form="compact"), count=9, max_length=64)
    with pytest.raises(RuntimeError, match=r"setup\(\)"):
        preview_dialogues(data, 2)
    data.setup()
    text = on_paper(preview_dialogues(data, 2))
    assert text.count("⟦") == 2
    assert all(f"row {data.train[place].index}:" in text for place in data.order(0)[:2])
    assert "9 of 9 rows" in text


def test_online_prompts_are_shown_with_their_lengths() -> None:
    tokenizer = tiny_tokenizer(110)
    examples = SudokuTask(form="compact").examples("train", 5, 1)
    prompts = [(example, encode_prompt(tokenizer, example.messages)) for example in examples]
    text = on_paper(preview_prompts(tokenizer, prompts, 2, "generated", {}, "sudoku"))
    assert text.count("ground truth:") == 2
    assert examples[1].ground_truth in text
