import itertools
import json
import random
import time
from fractions import Fraction

import pytest

from dare_lightning.rewards.countdown import CountdownReward, ExpressionError, evaluate, tokenize
from dare_lightning.rewards.sudoku import SudokuReward
from tests.rewards.cases import example, layout, real_examples

PUZZLE, SOLUTION = "3102200002100320", "3142243142131324"
EMPTY = PUZZLE.count("0")

HOSTILE = [
    "9**9**9**9",
    "9^9^9^9",
    "9" * 100_000,
    "(" * 10_000,
    "(" * 10_000 + "1" + ")" * 10_000,
    "-" * 10_000 + "1",
    "1+" * 10_000 + "1",
    "\u0661+\u0662",
    "\u00b2*\u00b3",
    "__import__('os').system('true')",
    "().__class__",
    "30//1",
    "1e9",
    "0x1F",
    "1_000",
    "030+93-100",
    "lambda: 1",
    "30+93-100\x00",
    "\uff13\uff10+93-100",
    "30 100 93",
    "",
    "\n",
]


def sudoku(completion, form="compact", puzzle=PUZZLE, solution=SOLUTION):
    return SudokuReward(form)([completion], [example(solution, puzzle=puzzle)])[0]


def countdown(completion, numbers=(30, 100, 93), target="23", form="compact"):
    return CountdownReward(form)([completion], [example(target, numbers=list(numbers))])[0]


def test_sudoku_reward_is_the_share_of_empty_cells():
    one_wrong = SOLUTION[:2] + "1" + SOLUTION[3:]  # cell 2 is empty in the puzzle
    assert (sudoku(SOLUTION).reward, sudoku(SOLUTION).status) == (1.0, "right")
    assert (sudoku(one_wrong).reward, sudoku(one_wrong).status) == ((EMPTY - 1) / EMPTY, "wrong")
    assert sudoku(PUZZLE).reward == 0.0


def test_a_changed_clue_is_not_scored_but_not_right_either():
    verdict = sudoku("1" + SOLUTION[1:])
    assert (verdict.reward, verdict.status) == (1.0, "wrong")


def test_short_and_long_grids_are_not_right():
    assert sudoku(SOLUTION[:-1]).reward == (EMPTY - 1) / EMPTY  # the last cell is empty in the puzzle
    assert (sudoku(SOLUTION + "1").reward, sudoku(SOLUTION + "1").status) == (1.0, "wrong")


def test_separators_between_the_digits_are_skipped():
    spaced = "\n".join(" ".join(SOLUTION[row : row + 4]) for row in range(0, 16, 4))
    assert sudoku(layout(spaced), form="paper").status == "right"


def test_a_sudoku_answer_outside_its_tags_is_unparsed():
    verdict = sudoku(SOLUTION, form="paper")
    assert (verdict.reward, verdict.status) == (0.0, "unparsed")
    assert sudoku("no digits").status == "unparsed"


@pytest.mark.parametrize(
    ("puzzle", "solution"), [("31", SOLUTION), (PUZZLE, ""), (SOLUTION, SOLUTION), (PUZZLE, "4" * 16)]
)
def test_an_impossible_sudoku_is_excluded_and_named(puzzle, solution, caplog):
    case = example(solution, 17, "grids", puzzle=puzzle)
    (verdict,) = SudokuReward("compact")([solution], [case])
    assert (verdict.reward, verdict.status) == (0.0, "excluded")
    assert "grids[17]" in caplog.text


@pytest.mark.parametrize("name", ["rl/train/sudoku", "rl/test/sudoku"])
def test_real_sudoku_solutions_are_right(name):
    examples = real_examples(f"data/{name}.parquet", step=20)
    completions = [layout(case.ground_truth) for case in examples]
    assert {verdict.status for verdict in SudokuReward()(completions, examples)} == {"right"}


@pytest.mark.parametrize(
    ("expression", "reward"),
    [
        ("30+93-100", 1.0),
        (" 30 + (93 - 100)\n", 1.0),
        ("-(100-30-93)", 1.0),
        ("30--93-100", 1.0),
        ("30+93+100", 0.1),
        ("30/(93-93)+100", 0.0),
        ("30+93-100-0", 0.0),
        ("30+30+93-100", 0.0),
        ("93-70", 0.0),
        ("30+93-100=23", 0.0),
        ("30+93-100)", 0.0),
        ("(30+93-100", 0.0),
        ("30+93-", 0.0),
        ("23", 0.0),
    ],
)
def test_countdown_values_by_hand(expression, reward):
    assert countdown(expression).reward == reward


def test_countdown_numbers_are_a_multiset():
    assert countdown("5+5+1", (5, 5, 1), "11").reward == 1.0
    assert countdown("5+1+1", (5, 5, 1), "7").reward == 0.0
    assert countdown("5+1", (5, 5, 1), "6").reward == 0.0


def test_countdown_is_exact_where_floats_are_not():
    assert countdown("(1/49)*49", (1, 49, 49), "1").reward == 1.0
    assert countdown("8/(3-8/3)", (8, 3, 8, 3), "24").reward == 1.0
    assert countdown("99999999999/99999999998", (99999999999, 99999999998), "1").reward == 0.1


def test_division_by_zero_has_the_right_numbers_and_no_value():
    assert countdown("1/(5-5)", (1, 5, 5), "1").reward == 0.1


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("form", ["paper", "compact"])
def test_hostile_expressions_score_zero_at_once(text, form):
    started = time.perf_counter()
    verdict = countdown(f"<answer>{text}</answer>" if form == "paper" else text, form=form)
    assert time.perf_counter() - started < 0.05
    assert verdict.reward == 0.0
    assert verdict.status in ("wrong", "unparsed")


def test_huge_multisets_and_deep_nesting_stay_bounded():
    started = time.perf_counter()
    deep = "(" * 100 + "1" + ")" * 100
    assert countdown(deep, (1,), "1").reward == 0.0
    big = "*".join(["999999999999"] * 19)
    assert countdown(big, (999999999999,) * 19, "1").reward == 0.1
    assert time.perf_counter() - started < 0.1


def test_evaluation_agrees_with_python_on_random_expressions():
    rng = random.Random(0)

    def grow(depth):
        if depth == 0 or rng.random() < 0.2:
            return str(rng.randint(0, 20))
        left, right = grow(depth - 1), grow(depth - 1)
        text = f"{left}{rng.choice('+-*/')}{right}"
        return rng.choice([f"({text})", f"-({text})", text])

    for _ in range(2000):
        text = grow(4)
        wrapped = "".join(f"Fraction({part})" if part.isdigit() else part for part in split_numbers(text))
        try:
            expected = eval(wrapped, {"Fraction": Fraction})
        except ZeroDivisionError:
            with pytest.raises(ZeroDivisionError):
                evaluate(tokenize(text))
            continue
        assert evaluate(tokenize(text)) == expected


def split_numbers(text):
    return ["".join(group) for _, group in itertools.groupby(text, str.isdigit)]


def test_random_symbols_never_raise_anything_else():
    rng = random.Random(1)
    for _ in range(5000):
        text = "".join(rng.choice("0123+-*/() ") for _ in range(rng.randint(0, 40)))
        try:
            evaluate(tokenize(text))
        except (ExpressionError, ZeroDivisionError):
            continue


def solve(numbers, target):
    """Brute force: any expression over all numbers that gives the target."""
    states = [[(Fraction(number), str(number)) for number in numbers]]
    while states:
        terms = states.pop()
        if len(terms) == 1:
            if terms[0][0] == target:
                return terms[0][1]
            continue
        for i, j in itertools.permutations(range(len(terms)), 2):
            rest = [term for k, term in enumerate(terms) if k not in (i, j)]
            (a, left), (b, right) = terms[i], terms[j]
            options = [(a + b, "+"), (a - b, "-"), (a * b, "*")] + ([(a / b, "/")] if b else [])
            states += [[*rest, (value, f"({left}{sign}{right})")] for value, sign in options]
    return None


def test_real_countdown_rows_accept_a_solution():
    examples = real_examples("data/rl/test/countdown.parquet", step=4)
    found = [solve(json.loads(case.extra["numbers"]), int(case.ground_truth)) for case in examples]
    solved = [(layout(text), case) for text, case in zip(found, examples, strict=True) if text is not None]
    assert len(solved) > len(examples) * 0.9
    verdicts = CountdownReward()([text for text, _ in solved], [case for _, case in solved])
    assert {verdict.reward for verdict in verdicts} == {1.0}


@pytest.mark.parametrize(("numbers", "target"), [("[1, 2", "3"), ([1, 2], "x"), ([], "3"), ([1, None], "3")])
def test_an_unreadable_countdown_task_is_excluded_and_named(numbers, target, caplog):
    (verdict,) = CountdownReward("compact")(["1+2"], [example(target, 3, "numbers", numbers=numbers)])
    assert (verdict.reward, verdict.status) == (0.0, "excluded")
    assert "numbers[3]" in caplog.text


@pytest.mark.parametrize(("reward", "key"), [(SudokuReward(), "puzzle"), (CountdownReward(), "numbers")])
def test_rows_of_another_task_are_refused(reward, key):
    with pytest.raises(ValueError, match=rf"toy\[4\] has no extra\['{key}'\]"):
        reward(["1"], [example("1", 4, split="train")])


@pytest.mark.parametrize("reward", [SudokuReward, CountdownReward])
def test_an_unknown_form_names_the_known_ones(reward):
    with pytest.raises(ValueError, match="paper, compact"):
        reward("long")


def test_a_batch_that_does_not_pair_up_is_refused():
    with pytest.raises(ValueError, match="2 completions for 1 examples"):
        SudokuReward("compact")(["", ""], [example(SOLUTION, puzzle=PUZZLE)])
