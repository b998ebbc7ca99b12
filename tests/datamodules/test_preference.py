"""Preference pairs: which columns are read, what is dropped, and that a pair stays together."""

from __future__ import annotations

import io
import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rich.console import Console

from dare_lightning.datamodules.pairs import (
    CONTRADICTED,
    EQUAL_ANSWERS,
    NO_ANSWER,
    NO_PROMPT,
    OTHER_PROMPTS,
    recognise_pair_layout,
    to_preferences,
)
from dare_lightning.datamodules.preference import TOO_LONG, Pair, PreferenceDataModule
from dare_lightning.datamodules.preview import preview_dialogues
from dare_lightning.datamodules.sources import read_rows
from dare_lightning.evaluation.benchmarks.sudoku import SudokuTask
from dare_lightning.families.llada import LLaDA
from dare_lightning.methods.vrpo import VRPO
from dare_lightning.replay.batch import SequenceBatch
from tests.tiny import tiny_llada

USER, OTHER = {"role": "user", "content": "2+2?"}, {"role": "user", "content": "3+3?"}


def _answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write(folder: Path, rows: list[dict[str, Any]]) -> str:
    (folder / "pairs.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return str(folder / "pairs.jsonl")


@pytest.fixture(scope="module")
def policy() -> LLaDA:
    return tiny_llada(vocab=110)


def ready(policy: LLaDA, **settings: Any) -> PreferenceDataModule:
    data = PreferenceDataModule(policy, **{"batch_size": 4, "micro_batch": 2, "max_length": 64} | settings)
    data.setup()
    return data


LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "trl_texts": ("trl", {"prompt": "2+2?", "chosen": "4", "rejected": "5"}),
    "trl_messages": ("trl", {"prompt": [USER], "chosen": [_answer("4")], "rejected": [_answer("5")]}),
    "trl_implicit": ("trl_implicit_prompt", {"chosen": [USER, _answer("4")], "rejected": [USER, _answer("5")]}),
    "ultrafeedback": (
        "ultrafeedback",
        {
            "prompt": "2+2?",
            "prompt_id": "a1",
            "messages": [USER, _answer("4")],
            "chosen": [USER, _answer("4")],
            "rejected": [USER, _answer("5")],
            "score_chosen": 8.0,
            "score_rejected": 3,
        },
    ),
    "verl": (
        "verl",
        {"data_source": "sums", "prompt": [USER], "extra_info": {"index": 0, "chosen": "4", "rejected": "5"}},
    ),
}


@pytest.mark.parametrize(("layout", "row"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_gives_the_same_pair(tmp_path: Path, layout: str, row: dict[str, Any]) -> None:
    table = read_rows(write(tmp_path, [row]))
    assert recognise_pair_layout(table.columns) == layout
    dropped: Counter[str] = Counter()
    (pair,) = to_preferences(table, dropped)
    assert list(pair.messages) == [USER, _answer("4")]
    assert list(pair.rejected) == [USER, _answer("5")]
    assert pair.context == 1
    assert not dropped


def test_earlier_turns_that_both_answers_share_are_their_prompt(tmp_path: Path) -> None:
    history = [{"role": "system", "content": "brief"}, USER, _answer("4"), OTHER]
    row = {"prompt": "3+3?", "chosen": [*history, _answer("6")], "rejected": [*history, _answer("7")]}
    (pair,) = to_preferences(read_rows(write(tmp_path, [row])), Counter())
    assert list(pair.messages[: pair.context]) == history
    assert list(pair.rejected[pair.context :]) == [_answer("7")]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "2+2?", "chosen": "4", "rejected": " 4 "}, EQUAL_ANSWERS),
        ({"prompt": "2+2?", "chosen": "4", "rejected": ""}, NO_ANSWER),
        ({"prompt": "2+2?", "chosen": None, "rejected": "5"}, NO_ANSWER),
        ({"prompt": "", "chosen": "4", "rejected": "5"}, NO_PROMPT),
        ({"prompt": "2+2?", "chosen": [USER, _answer("4")], "rejected": [OTHER, _answer("5")]}, OTHER_PROMPTS),
        ({"prompt": "9+9?", "chosen": [USER, _answer("4")], "rejected": [USER, _answer("5")]}, OTHER_PROMPTS),
        ({"prompt": "2+2?", "chosen": [USER, _answer("4")], "rejected": [_answer("5")]}, OTHER_PROMPTS),
        ({"prompt": "2+2?", "chosen": [USER, OTHER], "rejected": [USER, _answer("5")]}, NO_ANSWER),
        (
            {"prompt": "2+2?", "chosen": "4", "rejected": "5", "score_chosen": 1.0, "score_rejected": 2.0},
            CONTRADICTED,
        ),
    ],
)
def test_rows_that_teach_no_preference_are_dropped_and_counted(
    tmp_path: Path, row: dict[str, Any], reason: str
) -> None:
    dropped: Counter[str] = Counter()
    assert to_preferences(read_rows(write(tmp_path, [row])), dropped) == []
    assert dropped == {reason: 1}


def test_close_scores_are_kept_unless_a_margin_is_asked_for(tmp_path: Path) -> None:
    row = {"prompt": "2+2?", "chosen": "4", "rejected": "5", "score_chosen": 5, "score_rejected": 5}
    table = read_rows(write(tmp_path, [row]))
    assert len(to_preferences(table, Counter())) == 1
    assert to_preferences(table, Counter(), min_margin=0.5) == []


def test_wrong_types_and_unknown_columns_are_errors_that_name_the_place(tmp_path: Path) -> None:
    row = {"prompt": "2+2?", "chosen": "4", "rejected": 5}
    with pytest.raises(ValueError, match=r"pairs.jsonl, row 1: rejected is 5 \(int\)"):
        to_preferences(read_rows(write(tmp_path, [row])), Counter())
    scored = {"prompt": "a", "chosen": "4", "rejected": "5", "score_chosen": "high", "score_rejected": 1}
    with pytest.raises(ValueError, match="score_chosen is 'high'"):
        to_preferences(read_rows(write(tmp_path, [scored])), Counter())
    with pytest.raises(
        ValueError, match="hold no preference pairs; rename them to one of: verl: .*trl: prompt, chosen"
    ):
        recognise_pair_layout(["question", "good", "bad"])


def _rows(count: int = 10) -> list[dict[str, Any]]:
    return [
        {"prompt": "a" * (n % 4 + 1), "chosen": "b" * (n % 5 + 1), "rejected": "c" * (n % 3 + 1)} for n in range(count)
    ]


def test_a_batch_holds_whole_pairs_with_the_preferred_answer_rewarded(policy: LLaDA, tmp_path: Path) -> None:
    data = ready(policy, path=write(tmp_path, _rows()))
    for window in data.windows(0, 0, 1):
        for make in window:
            batch = make()
            assert len(batch) == 4
            assert batch.reward is not None
            assert batch.group_index is not None
            assert batch.reward.tolist() == [1, 0] * 2
            assert torch.equal(batch.group_index[::2], batch.group_index[1::2])
            texts = [
                policy.tokenizer.decode(ids[taught])
                for ids, taught in zip(batch.ids, batch.completion_mask, strict=True)
            ]
            assert all(text.startswith("b") for text in texts[::2])
            assert all(text.startswith("c") for text in texts[1::2])
            assert all(text.endswith("<|eot_id|><|endoftext|>") for text in texts)
            assert len(set(batch.noise_seed.tolist())) == 4


def test_the_noise_of_a_pair_depends_on_the_epoch_and_its_row_alone(policy: LLaDA, tmp_path: Path) -> None:
    data = ready(policy, path=write(tmp_path, _rows()))

    def seeds(epoch: int, rank: int, world: int) -> dict[tuple[int, float], int]:
        found: dict[tuple[int, float], int] = {}
        for batch in (make() for window in data.windows(epoch, rank, world) for make in window):
            assert batch.reward is not None
            keys = zip(batch.sample_index.tolist(), batch.reward.tolist(), strict=True)
            found |= dict(zip(keys, batch.noise_seed.tolist(), strict=True))
        return found

    whole = seeds(0, 0, 1)
    assert whole == seeds(0, 0, 2) | seeds(0, 1, 2)
    assert not set(whole.values()) & set(seeds(1, 0, 1).values())


def test_answers_that_do_not_fit_with_their_end_are_dropped_and_counted(policy: LLaDA, tmp_path: Path) -> None:
    rows = [*_rows(3), {"prompt": "a", "chosen": "b", "rejected": "c" * 100}]
    data = ready(policy, path=write(tmp_path, rows))
    assert data.report is not None
    assert data.report.dropped == {TOO_LONG: 1}
    assert data.report.kept == len(data.train) == 3
    assert "1 dropped: an answer is longer than max_length" in str(data.report)


def test_generated_pairs_prefer_the_solution_and_drop_equal_answers(policy: LLaDA) -> None:
    tasks = {"task": SudokuTask(form="compact"), "rejected_task": SudokuTask(form="compact", careless=0.5)}
    data = ready(policy, count=20, val_count=4, append_eos=False, **tasks)
    assert data.report is not None
    assert 0 < data.report.dropped[EQUAL_ANSWERS] < 20
    for pair in data.train:
        assert isinstance(pair, Pair)
        good, bad = (policy.tokenizer.decode(e.ids[e.prompt_length :]) for e in (pair.encoded, pair.rejected))
        assert "0" not in good
        assert "0" in bad


def test_a_preview_shows_both_answers(policy: LLaDA, tmp_path: Path) -> None:
    data = ready(policy, path=write(tmp_path, _rows(1)))
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(preview_dialogues(data, 1))
    text = console.export_text()
    assert "⟦b<|eot_id|>" in text
    assert "⟦c<|eot_id|>" in text


def test_one_generator_alone_is_refused(policy: LLaDA) -> None:
    with pytest.raises(ValueError, match=r"data.task and data.rejected_task generate the two answers"):
        PreferenceDataModule(policy, task=SudokuTask(form="compact"), count=4)


def test_a_run_on_pairs_does_not_depend_on_the_micro_batch(tmp_path: Path) -> None:
    path = write(tmp_path, _rows(8))

    def trained(micro_batch: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = tiny_llada(vocab=110).double()
        data = PreferenceDataModule(
            model, path=path, val_share=0.2, batch_size=4, micro_batch=micro_batch, max_length=64
        )
        method = VRPO(policy=model, optimizer=partial(torch.optim.SGD, lr=0.1), samples=2)
        trainer = L.Trainer(
            max_epochs=1,
            accelerator="cpu",
            accumulate_grad_batches=4 // micro_batch,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(method, datamodule=data)
        assert trainer.global_step > 0
        assert float(trainer.callback_metrics["val/loss"]) < 0.7
        return model.state_dict()

    torch.testing.assert_close(trained(1), trained(4), rtol=1e-9, atol=1e-11)


def test_held_out_pairs_have_the_same_noise_at_every_validation(policy: LLaDA, tmp_path: Path) -> None:
    data = ready(policy, path=write(tmp_path, _rows(8)), val_path=write(tmp_path, _rows(8)))

    def noise() -> list[list[int]]:
        batches: list[SequenceBatch] = list(data.val_dataloader())
        return [batch.noise_seed.tolist() for batch in batches]

    assert noise() == noise()
