"""Which prompts a rollout asks, on which rank, and what is refused."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dare_lightning.datamodules.prompts import PromptDataModule, Prompts
from dare_lightning.evaluation.benchmarks.sudoku import SudokuTask
from dare_lightning.rewards.sudoku import SudokuReward
from tests.tiny import tiny_llada

POLICY = tiny_llada()
SIZES: dict[str, Any] = {"group_size": 2, "prompts_per_rollout": 4, "micro_batch": 2, "val_prompts": 3}


def prompts(**settings: Any) -> PromptDataModule:
    given: dict[str, Any] = SIZES | {"task": SudokuTask(form="compact"), "train_prompts": 6}
    return PromptDataModule(POLICY, SudokuReward("compact"), **given | settings)


def ready(**settings: Any) -> PromptDataModule:
    data = prompts(**settings)
    data.setup()
    return data


def from_file(folder: Path, rows: int = 12, repeated: int = 0, **settings: Any) -> PromptDataModule:
    """Prompts of a file whose last `repeated` rows say what the first ones say; the longest are the last."""
    asked = [f"{i}+{i}=" + "?" * i for i in range(rows - repeated)]
    file = folder / "prompts.jsonl"
    lines = [{"prompt": text, "answer": str(i)} for i, text in enumerate([*asked, *asked[:repeated]])]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ready(path=str(file), task=None, train_prompts=None, **settings)


def questions(asked: Prompts) -> list[str]:
    return [example.messages[-1]["content"] for example in asked.examples]


def test_every_prompt_is_asked_once_before_any_is_asked_again() -> None:
    data = ready(train_prompts=6)
    asked = [q for rollout in range(9) for q in questions(data.prompts_for(rollout, 0, 1))[::2]]
    laps = [asked[start : start + 6] for start in range(0, 36, 6)]
    assert all(len(set(lap)) == 6 for lap in laps)
    assert len({tuple(lap) for lap in laps}) > 1  # each in its own order


def test_the_order_is_the_same_from_any_rollout_on() -> None:
    data, fresh = ready(), ready()
    for rollout in range(5):
        data.prompts_for(rollout, 0, 1)
    assert data.prompts_for(7, 0, 1) == fresh.prompts_for(7, 0, 1)
    assert data.prompts_for(2, 0, 1) == ready().prompts_for(2, 0, 1)
    assert ready(seed=1).prompts_for(2, 0, 1) != ready().prompts_for(2, 0, 1)


@pytest.mark.parametrize("updates", [1, 2])
def test_ranks_share_a_rollout_in_whole_groups(updates: int) -> None:
    data = ready(updates_per_rollout=updates)
    whole = data.prompts_for(3, 0, 1)
    ranks = [data.prompts_for(3, rank, 2) for rank in range(2)]
    assert sorted(i for part in ranks for i in part.sample_index) == whole.sample_index == list(range(8))
    for part in ranks:
        assert set(Counter(part.group_index).values()) == {data.group_size}
        for sample, seed, group, ids in zip(part.sample_index, part.seeds, part.group_index, part.ids, strict=True):
            place = whole.sample_index.index(sample)
            assert (seed, group, ids) == (whole.seeds[place], whole.group_index[place], whole.ids[place])
    # Each update's window, half of the rollout where there are two, is dealt to both.
    half = len(ranks[0].group_index) // updates
    windows = [set(ranks[0].group_index[:half]) | set(ranks[1].group_index[:half])]
    assert windows == [set(range(4 // updates))]


def test_no_two_completions_share_a_seed() -> None:
    data = ready()
    seeds = [seed for rollout in range(20) for seed in data.prompts_for(rollout, 0, 1).seeds]
    assert len(set(seeds)) == len(seeds)


def test_held_out_rows_of_a_file_are_not_trained_on(tmp_path: Path) -> None:
    data = from_file(tmp_path)
    train = {example.index for example, _ in data.train}
    heldout = {example.index for example, _ in data.heldout}
    assert (len(train), len(heldout)) == (9, 3)
    assert not train & heldout
    fewer = ready(path=str(tmp_path / "prompts.jsonl"), task=None, train_prompts=5)
    assert {example.index for example, _ in fewer.heldout} == heldout
    assert {example.index for example, _ in fewer.train} < train


def test_a_held_out_prompt_that_comes_twice_in_a_file_is_not_trained_on(tmp_path: Path) -> None:
    data = from_file(tmp_path, rows=20, repeated=10, val_prompts=5)
    heldout = {example.messages[-1]["content"] for example, _ in data.heldout}
    assert not heldout & {example.messages[-1]["content"] for example, _ in data.train}
    assert data.dropped == {"training: same prompt as a held-out one": 20 - 5 - len(data.train)}
    assert sum(data.dropped.values()) >= 3


def test_generated_prompts_are_disjoint() -> None:
    data = ready(train_prompts=200, val_prompts=50)
    train = {example.extra["puzzle"] for example, _ in data.train}
    assert not train & {example.extra["puzzle"] for example, _ in data.heldout}


def test_long_prompts_are_dropped_counted_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    everything = from_file(tmp_path)
    lengths = sorted(len(ids) for _, ids in [*everything.train, *everything.heldout])
    limit = lengths[-3]  # two are longer
    with caplog.at_level(logging.WARNING):
        data = from_file(tmp_path, max_prompt_tokens=limit)
    assert sum(data.dropped.values()) == 2
    assert all(f"longer than data.max_prompt_tokens={limit}" in reason for reason in data.dropped)
    assert "prompts dropped" in caplog.text
    assert max(len(ids) for _, ids in [*data.train, *data.heldout]) == limit


def test_held_out_prompts_are_dealt_to_the_ranks_and_keep_their_seeds() -> None:
    (batch,) = list(ready(val_prompts=5).val_dataloader())
    (again,) = list(ready(val_prompts=5, group_size=4).val_dataloader())
    assert batch.sample_index == list(range(5))
    assert batch.seeds == again.seeds


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 1}, "data.group_size=1: .* use 2 or more"),
        ({"inner_epochs": 0}, "data.inner_epochs=0 must be at least 1"),
        ({"task": None, "train_prompts": None}, "there are no prompts: set data.path"),
        ({"train_prompts": None}, "data.train_prompts must say how many"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prompts(**settings)


@pytest.mark.parametrize(
    ("settings", "world", "message"),
    [
        ({"prompts_per_rollout": 6, "updates_per_rollout": 4}, 1, "6 is not a multiple of .* 4 × 1 = 4; choose 4 or 8"),
        ({"prompts_per_rollout": 2}, 4, "2 is not a multiple of .* 1 × 4 = 4; choose 4"),
        ({"group_size": 6, "prompts_per_rollout": 1, "micro_batch": 4}, 1, "6 completions .*=4; choose 2 or 3"),
    ],
)
def test_sizes_that_do_not_divide_name_the_nearest_that_do(settings: Any, world: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prompts(**settings).micro_batches_per_step(world)


def test_too_few_prompts_for_a_rollout_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 training prompts cannot fill a rollout of 4"):
        ready(train_prompts=2)
    with pytest.raises(ValueError, match="0 training and 12 held-out prompts are left; need both"):
        from_file(tmp_path, val_prompts=12)


@pytest.mark.parametrize(("world", "expected"), [(1, 4), (2, 2), (4, 1)])
def test_micro_batches_of_a_step_follow_from_the_sizes(world: int, expected: int) -> None:
    assert prompts().micro_batches_per_step(world) == expected


def test_without_a_rollout_there_is_nothing_to_train_on() -> None:
    with pytest.raises(RuntimeError, match="nothing collects rollouts.*rollout=builtin"):
        ready().ensure_rollout(0)
