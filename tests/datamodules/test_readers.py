"""Every layout and every kind of source, and what is said about rows that cannot be used."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from dare_lightning.datamodules.readers import read_examples, recognise_layout, to_dialogues, to_examples
from dare_lightning.datamodules.sources import RowTable, read_rows
from tests.shared import shared_file

USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
VERL: dict[str, Any] = {
    "data_source": "sums",
    "prompt": [{"role": "user", "content": "2+2? Think."}],
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"question": "2+2?", "answer": "4", "index": 7},
}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "verl": ("verl", VERL),
    "trl_text": ("prompt_completion", {"prompt": "2+2?", "completion": "4"}),
    "trl_messages": ("prompt_completion", {"prompt": [USER], "completion": [ANSWER]}),
    "messages": ("messages", {"messages": [USER, ANSWER]}),
    "alpaca": ("alpaca", {"instruction": "2+2?", "input": "", "output": "4"}),
    "sharegpt": ("sharegpt", {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}),
}


def table(*rows: Mapping[str, Any]) -> RowTable:
    return RowTable(tuple(dict.fromkeys(key for row in rows for key in row)), rows, (("data.jsonl", 0),))


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return str(path)


@pytest.mark.parametrize("write", [write_lines, write_parquet])
@pytest.mark.parametrize(("layout", "row"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_conversation_is_read_from_every_layout_and_format(
    tmp_path: Path, write: Any, layout: str, row: dict[str, Any]
) -> None:
    found = read_rows(write(tmp_path / ("x.jsonl" if write is write_lines else "x.parquet"), [row, row]))
    assert recognise_layout(found.columns) == layout
    dialogues = to_dialogues(found)
    assert [list(dialogue.messages) for dialogue in dialogues] == [[USER, ANSWER]] * 2
    assert [dialogue.index for dialogue in dialogues] == [0, 1]


@pytest.mark.parametrize(("layout", "row"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_prompt_and_its_ground_truth_are_read_from_every_layout(layout: str, row: dict[str, Any]) -> None:
    (example,) = to_examples(table(row))
    assert list(example.messages) == (row["prompt"] if layout == "verl" else [USER])
    assert example.ground_truth == "4"


def test_verl_prompts_keep_what_a_verifier_reads() -> None:
    (example,) = to_examples(table(VERL))
    assert example.extra == VERL["extra_info"]
    assert example.source == "sums"


def test_a_prompt_column_alone_takes_the_ground_truth_and_the_rest_from_other_columns() -> None:
    (example,) = to_examples(table({"prompt": "2+2?", "solution": 4, "numbers": [2, 2]}))
    assert (example.ground_truth, example.extra["numbers"]) == ("4", [2, 2])


def test_few_shot_answers_in_a_prompt_stay_in_it_and_are_not_learnt() -> None:
    shots = [USER, ANSWER, {"role": "user", "content": "3+3?"}]
    (example,) = to_examples(table({"prompt": shots, "completion": "6"}))
    (dialogue,) = to_dialogues(table({"prompt": shots, "completion": "6"}))
    assert list(example.messages) == shots
    assert dialogue.context == 3


def test_every_answer_of_a_conversation_is_learnt() -> None:
    (dialogue,) = to_dialogues(table({"messages": [USER, ANSWER, USER, ANSWER]}))
    assert dialogue.context == 0


def test_the_input_of_an_alpaca_row_follows_its_instruction() -> None:
    (dialogue,) = to_dialogues(table({"instruction": "Add.", "input": "2 {2}", "output": "4", "system": "Be brief."}))
    assert [turn["content"] for turn in dialogue.messages] == ["Be brief.", "Add.\n\n2 {2}", "4"]


def test_text_after_the_last_answer_is_cut_off() -> None:
    (dialogue,) = to_dialogues(table({"messages": [USER, ANSWER, USER, {"role": "assistant", "content": " "}]}))
    assert list(dialogue.messages) == [USER, ANSWER]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "2+2?", "completion": ""}, "no answer"),
        ({"prompt": "2+2?", "completion": None}, "no answer"),
        ({"prompt": "", "completion": "4"}, "no prompt"),
        ({"prompt": None, "completion": "4"}, "no prompt"),
        ({"messages": [USER]}, "no answer"),
        ({"messages": [ANSWER]}, "no prompt"),
        (VERL | {"extra_info": {"index": 7}}, "no answer"),
    ],
)
def test_a_row_that_cannot_be_learnt_is_dropped_and_counted(row: dict[str, Any], reason: str) -> None:
    dropped: Counter[str] = Counter()
    good: dict[str, Any] = (
        {"prompt": "2+2?", "completion": "4"} if "completion" in row else {**VERL, "messages": [USER, ANSWER]}
    )
    if "messages" in row:
        good = {"messages": [USER, ANSWER]}
    assert len(to_dialogues(table(row, good), dropped)) == 1
    assert dropped == {reason: 1}


def test_a_prompt_that_is_empty_or_cannot_be_judged_is_dropped_and_counted() -> None:
    dropped: Counter[str] = Counter()
    rows = [{"prompt": "", "solution": "4"}, {"prompt": "2+2?", "solution": ""}, {"prompt": "2+2?", "solution": "4"}]
    assert len(to_examples(table(*rows), dropped)) == 1
    assert dropped == {"no prompt": 1, "no ground truth": 1}


def test_rows_dropped_from_a_prompt_file_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read_examples(write_lines(tmp_path / "x.jsonl", [{"prompt": "a", "answer": ""}, {"prompt": "a", "answer": "b"}]))
    assert "x.jsonl: 1 rows dropped: no ground truth" in caplog.text


def test_prompts_of_a_data_set_without_reference_answers_are_kept() -> None:
    (example,) = to_examples(table({"prompt": "write a poem"}))
    assert example.ground_truth == ""


def test_unknown_columns_are_an_error_that_lists_them_and_the_layouts() -> None:
    with pytest.raises(ValueError, match=r"\['query', 'response'\].*verl: prompt, reward_model.*sharegpt"):
        recognise_layout(["response", "query"])


def test_preference_pairs_are_not_taken_for_prompts() -> None:
    with pytest.raises(ValueError, match="preference"):
        recognise_layout(["prompt", "chosen", "rejected"])


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"prompt": 5, "completion": "4"}, r"prompt is 5 \(int\)"),
        ({"prompt": "a", "completion": {"x": 1}}, r"completion is .*\(dict\)"),
        ({"messages": [USER, {"role": "judge", "content": "4"}]}, r"messages\[1\]\.role is 'judge' \(str\)"),
        ({"messages": [USER, {"role": "assistant", "content": ["4"]}]}, r"messages\[1\]\.content is \['4'\] \(list\)"),
        ({"messages": ["hello"]}, r"messages\[0\] is 'hello' \(str\)"),
        ({"instruction": "a", "output": 4}, r"output is 4 \(int\)"),
        ({"conversations": [{"value": "a"}]}, r"conversations\[0\]\.from is None \(NoneType\)"),
        (VERL | {"extra_info": "none"}, r"extra_info is 'none' \(str\)"),
    ],
)
def test_a_value_of_the_wrong_type_names_file_row_key_and_value(row: dict[str, Any], named: str) -> None:
    good = next(good for _, good in LAYOUTS.values() if good.keys() >= row.keys())
    with pytest.raises(ValueError, match=rf"data\.jsonl, row 2: {named}, expected"):
        to_dialogues(table(good, row))


def test_an_error_names_the_file_of_a_folder_and_the_row_in_it(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}] * 3)
    write_lines(tmp_path / "b.jsonl", [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": 1}])
    with pytest.raises(ValueError, match=r"b\.jsonl, row 2: completion"):
        to_dialogues(read_rows(str(tmp_path)))


def test_a_glob_reads_its_files_in_order(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_parquet(tmp_path / f"part-{name}.parquet", [{"prompt": name}])
    assert [row["prompt"] for row in read_rows(str(tmp_path / "part-*.parquet")).rows] == ["a", "b"]


def test_a_split_chooses_files_by_name_or_folder(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    write_parquet(tmp_path / "train-00000-of-00001.parquet", [{"prompt": "train"}])
    write_parquet(tmp_path / "trainer.parquet", [{"prompt": "other"}])
    write_parquet(tmp_path / "test" / "part.parquet", [{"prompt": "test"}])
    assert [row["prompt"] for row in read_rows(str(tmp_path), "train").rows] == ["train"]
    assert [row["prompt"] for row in read_rows(str(tmp_path), "test").rows] == ["test"]
    with pytest.raises(ValueError, match=r"split 'dev'; found test/part\.parquet, train-"):
        read_rows(str(tmp_path), "dev")


def test_a_limit_reads_the_first_rows(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", [{"prompt": str(n)} for n in range(5000)])
    assert [row["prompt"] for row in read_rows(path, limit=2).rows] == ["0", "1"]
    with pytest.raises(ValueError, match="limit=0"):
        read_rows(path, limit=0)


def test_a_json_list_reads_like_json_lines(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps([{"prompt": "a"}, {"prompt": "b"}], indent=1))
    assert [row["prompt"] for row in read_rows(str(tmp_path / "x.json")).rows] == ["a", "b"]


def test_a_saved_data_set_and_its_splits_are_read(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list([{"messages": [USER, ANSWER]}])
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(str(tmp_path / "two"))
    assert len(to_dialogues(read_rows(str(tmp_path / "one")))) == 1
    assert len(to_dialogues(read_rows(str(tmp_path / "two"), "test"))) == 1
    with pytest.raises(ValueError, match="no split 'dev'; it has train, test"):
        read_rows(str(tmp_path / "two"), "dev")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.parquet", b"PAR1 and no more", "cannot be read as parquet"),
        ("x.jsonl", b'{"prompt": "a"}\n{"prompt": \n', "line 2 is not valid JSON"),
        ("x.jsonl", b'{"prompt": "a"}\n["b"]\n', "line 2 is .*expected an object"),
        ("x.jsonl", b'{"prompt": "\xff"}\n', "cannot be read as JSON"),
        ("x.json", b"[{", "cannot be read as JSON"),
        ("x.jsonl", b"\n\n", "no rows"),
        ("x.csv", b"prompt\na\n", r"neither \.parquet"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}.*{message}|{message}.*{name}"):
        read_rows(str(tmp_path / name))


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no \.parquet"):
        read_rows(str(tmp_path))


def test_a_missing_file_is_not_looked_up_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file or folder .*missing\.parquet"):
        read_rows(str(tmp_path / "missing.parquet"))
    with pytest.raises(FileNotFoundError, match="no file or folder data.jsonl"):
        read_rows("data.jsonl")


def test_an_unreachable_hub_name_says_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="no file or folder nobody/nothing .*hub cannot be reached"):
        read_rows("nobody/nothing")


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_real_fine_tuning_file_reads_completely(split: str) -> None:
    dropped: Counter[str] = Counter()
    found = read_rows(str(shared_file(f"data/sft/{split}/gsm8k.parquet")))
    dialogues = to_dialogues(found, dropped)
    assert len(dialogues) == len(found)
    assert not dropped
    assert all("####" in dialogue.messages[-1]["content"] for dialogue in dialogues)
    assert not any("Let's think step by step" in dialogue.messages[0]["content"] for dialogue in dialogues)


def test_every_real_prompt_file_reads_completely() -> None:
    for file in sorted(shared_file("data/rl").glob("*/*.parquet")):
        dropped: Counter[str] = Counter()
        examples = read_examples(str(file), limit=300, dropped=dropped)
        assert set(dropped) <= {"no ground truth"}
        assert len(examples) + dropped.total() == len(read_rows(str(file), limit=300))
        assert all(example.ground_truth for example in examples)
        # MBPP prompts end in the beginning of the answer.
        assert {example.messages[-1]["role"] for example in examples} == {
            "assistant" if file.stem == "mbpp" else "user"
        }
        if file.stem in ("sudoku", "countdown"):
            assert {"sudoku": "puzzle", "countdown": "numbers"}[file.stem] in examples[0].extra
