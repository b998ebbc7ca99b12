"""Generated Sudoku and Countdown tasks."""

import json
import time

import pytest

from dare_lightning.evaluation.benchmarks import countdown as countdown_module
from dare_lightning.evaluation.benchmarks.countdown import PAPER_PROMPT, CountdownTask
from dare_lightning.evaluation.benchmarks.sudoku import SudokuTask, all_grids, canonical, solutions
from dare_lightning.rewards.countdown import CountdownReward
from dare_lightning.rewards.sudoku import SudokuReward
from tests.rewards.cases import real_rows

TASKS = {
    "sudoku_paper": (SudokuTask(), SudokuReward()),
    "sudoku_compact": (SudokuTask((6, 10), "compact"), SudokuReward("compact")),
    "countdown_paper": (CountdownTask(), CountdownReward()),
    "countdown_compact": (CountdownTask((3, 4), form="compact"), CountdownReward("compact")),
}
every_task = pytest.mark.parametrize(("task", "reward"), TASKS.values(), ids=TASKS.keys())


def content(example):
    return example.messages[-1]["content"]


def test_there_are_288_grids_and_each_is_valid():
    grids = all_grids()
    assert len(set(grids)) == len(grids) == 288
    units = [range(4 * i, 4 * i + 4) for i in range(4)] + [range(i, 16, 4) for i in range(4)]
    units += [[corner, corner + 1, corner + 4, corner + 5] for corner in (0, 2, 8, 10)]
    assert all({grid[cell] for cell in unit} == set("1234") for grid in grids for unit in units)


@pytest.mark.parametrize("empty", [1, 6, 9, 12, (4, 11)])
def test_every_puzzle_has_one_solution_and_the_asked_number_of_empty_cells(empty):
    low, high = (empty, empty) if isinstance(empty, int) else empty
    examples = SudokuTask(empty, "compact").examples("heldout", 100, seed=3)
    for example in examples:
        puzzle = example.extra["puzzle"]
        assert low <= puzzle.count("0") <= high
        assert brute_force(puzzle) == [example.ground_truth]
    if low < high:
        assert {example.extra["puzzle"].count("0") for example in examples} == set(range(low, high + 1))


def brute_force(puzzle):
    return [grid for grid in all_grids() if all(a in ("0", b) for a, b in zip(puzzle, grid, strict=True))]


@every_task
def test_the_fine_tuning_answer_scores_right(task, reward):
    examples = task.examples("train", 300, seed=1)
    verdicts = reward([example.extra["answer"] for example in examples], examples)
    assert {(verdict.reward, verdict.status) for verdict in verdicts} == {(1.0, "right")}


@every_task
def test_the_same_seed_gives_the_same_tasks_and_a_longer_list_begins_alike(task, reward):
    examples = task.examples("train", 50, seed=5)
    assert task.examples("train", 80, seed=5)[:50] == examples
    assert task.examples("train", 50, seed=6) != examples
    assert [example.index for example in examples] == list(range(50))


def task_key(example):
    if "puzzle" in example.extra:
        return canonical(example.extra["puzzle"])
    return tuple(sorted(example.extra["numbers"])), example.ground_truth


@every_task
def test_train_and_held_out_tasks_never_overlap(task, reward):
    train = [example for seed in range(2) for example in task.examples("train", 600, seed)]
    heldout = [example for seed in range(2) for example in task.examples("heldout", 150, seed)]
    assert {task_key(example) for example in train}.isdisjoint(map(task_key, heldout))


def test_narrow_tasks_do_not_overlap_when_both_splits_are_exhausted():
    task = SudokuTask(1, "compact")
    counts = {}
    for split in ("train", "heldout"):
        with pytest.raises(ValueError, match=f"different {split} tasks found") as error:
            task.examples(split, 10_000, seed=0)
        counts[split] = int(str(error.value).split()[1])
    assert sum(counts.values()) == 288 * 16
    assert counts["heldout"] > 0


@every_task
def test_the_tasks_of_one_call_differ(task, reward):
    examples = task.examples("heldout", 200, seed=2)
    assert len({content(example) for example in examples}) == 200


@pytest.mark.parametrize("name", ["train", "test"])
def test_the_sudoku_prompt_equals_the_published_one(name):
    task = SudokuTask()
    rows = real_rows(f"data/rl/{name}/sudoku.parquet", step=50)
    for row in rows:
        puzzle = row["extra_info"]["puzzle"]
        # A quarter of the published test puzzles have several solutions; ours never have.
        assert row["reward_model"]["ground_truth"] in solutions(puzzle)
        if len(solutions(puzzle)) > 1:
            continue
        made = task._example(puzzle, 0)
        assert [dict(message) for message in made.messages] == row["prompt"]
        assert made.ground_truth == row["reward_model"]["ground_truth"]


def test_the_default_number_of_empty_cells_is_the_published_one():
    rows = real_rows("data/rl/train/sudoku.parquet", step=50)
    made = SudokuTask().examples("train", 100, 0)
    assert {row["extra_info"]["puzzle"].count("0") for row in rows} == {
        example.extra["puzzle"].count("0") for example in made
    }


@pytest.mark.parametrize("name", ["train", "test"])
def test_the_countdown_prompt_equals_the_published_one(name):
    for row in real_rows(f"data/rl/{name}/countdown.parquet", step=50):
        numbers, target = json.loads(row["extra_info"]["numbers"]), int(row["reward_model"]["ground_truth"])
        problem = countdown_module.Problem(tuple(numbers), target, "", ())
        made = CountdownTask()._example(problem, 0)
        assert [dict(message) for message in made.messages] == row["prompt"]
        assert content(made) == PAPER_PROMPT.format(numbers=numbers, target=target)


def test_countdown_tasks_keep_their_ranges():
    examples = CountdownTask((2, 4), (5, 30), (40, 50), "compact").examples("train", 300, 0)
    assert {len(example.extra["numbers"]) for example in examples} == {2, 3, 4}
    assert all(5 <= number <= 30 for example in examples for number in example.extra["numbers"])
    assert all(40 <= int(example.ground_truth) <= 50 for example in examples)


def test_compact_messages_are_bare():
    sudoku = SudokuTask(9, "compact").examples("train", 1, 0)[0]
    assert content(sudoku) == sudoku.extra["puzzle"]
    assert sudoku.extra["answer"] == sudoku.ground_truth
    countdown = CountdownTask(form="compact").examples("train", 1, 0)[0]
    assert content(countdown) == ",".join(map(str, countdown.extra["numbers"])) + "=" + countdown.ground_truth


def test_thousands_of_puzzles_take_a_second():
    started = time.perf_counter()
    SudokuTask(9, "compact").examples("train", 3000, 0)
    assert time.perf_counter() - started < 3.0


@pytest.mark.parametrize("build", [lambda: SudokuTask(13), lambda: SudokuTask(0), lambda: SudokuTask((9, 8))])
def test_impossible_numbers_of_empty_cells_are_refused(build):
    with pytest.raises(ValueError, match=r"1\.\.12"):
        build()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": 7}, "2..6"),
        ({"number_range": (0, 9)}, "number_range"),
        ({"target_range": (9, 1)}, "target_range"),
        ({"form": "long"}, "paper, compact"),
    ],
)
def test_impossible_countdown_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        CountdownTask(**settings)


@every_task
def test_an_unknown_split_names_the_known_ones(task, reward):
    with pytest.raises(ValueError, match="train, heldout"):
        task.examples("test", 1, 0)


def test_careless_demonstrations_leave_cells_unsolved_and_change_nothing_else() -> None:
    clean = SudokuTask(form="compact").examples("train", 400, seed=3)
    mixed = SudokuTask(form="compact", careless=0.6).examples("train", 400, seed=3)
    assert [(e.messages, e.ground_truth, e.extra["puzzle"]) for e in clean] == [
        (e.messages, e.ground_truth, e.extra["puzzle"]) for e in mixed
    ]
    unsolved = [e for e in mixed if e.extra["answer"] != e.ground_truth]
    assert 0.5 < len(unsolved) / len(mixed) < 0.7
    for example in unsolved:
        pairs = zip(example.extra["answer"], example.ground_truth, example.extra["puzzle"], strict=True)
        assert all(said == digit or (said == "0" and clue == "0") for said, digit, clue in pairs)


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_careless_share_outside_its_range_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="careless"):
        SudokuTask(careless=share)
