"""Functions as rewards, and weighted sums."""

import math

import pytest

from dare_lightning.rewards.base import Verdict
from dare_lightning.rewards.combined import WeightedSum
from dare_lightning.rewards.format import FormatReward
from dare_lightning.rewards.function import FunctionReward
from dare_lightning.rewards.gsm8k import GSM8KReward
from tests.rewards.cases import example, layout

HERE = "tests.rewards.test_composed"
NOT_A_FUNCTION = 3


def length_reward(completions, examples):
    return [len(text) / 10 for text in completions]


def own_verdicts(completions, examples):
    return [Verdict(0.25, "timeout", answer=text) for text in completions]


def one_too_few(completions, examples):
    return [0.0] * (len(completions) - 1)


def not_finite(completions, examples):
    return [0.0, math.nan]


def not_a_number(completions, examples):
    return ["0", "1"]


def no_list(completions, examples):
    return 1.0


def one_argument(completions):
    return []


def test_a_functions_numbers_become_verdicts():
    verdicts = FunctionReward(f"{HERE}:length_reward")(["12345", "1234567890"], [example(), example()])
    assert [(verdict.reward, verdict.status) for verdict in verdicts] == [(0.5, "wrong"), (1.0, "right")]
    (solved,) = FunctionReward(f"{HERE}:length_reward", solved_at=0.5)(["12345"], [example()])
    assert solved.status == "right"


def test_a_functions_verdicts_are_kept():
    assert FunctionReward(f"{HERE}:own_verdicts")(["x"], [example()]) == [Verdict(0.25, "timeout", answer="x")]


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("tests.rewards.test_composed.length_reward", ValueError, "package.module:function"),
        ("no_such_package:f", ImportError, "cannot import no_such_package"),
        (f"{HERE}:lenght_reward", ImportError, "length_reward"),
        (f"{HERE}:NOT_A_FUNCTION", TypeError, "int, which cannot be called"),
        (f"{HERE}:one_argument", TypeError, r"\(completions, examples\)"),
    ],
)
def test_a_bad_path_fails_when_the_reward_is_built(path, error, message):
    with pytest.raises(error, match=message):
        FunctionReward(path)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("one_too_few", ValueError, "1 scores for 2 completions"),
        ("not_finite", ValueError, r"nan for completion 1 \(gsm8k\[7\]\)"),
        ("not_a_number", TypeError, "'0' for completion 0"),
        ("no_list", TypeError, "returned float"),
    ],
)
def test_bad_scores_name_the_row(name, error, message):
    with pytest.raises(error, match=message):
        FunctionReward(f"{HERE}:{name}")(["a", "b"], [example(), example(index=7, source="gsm8k")])


def both(solved_by=None):
    rewards = {"answer": GSM8KReward(), "format": FormatReward("strict", value=1.0)}
    return WeightedSum(rewards, {"answer": 2.0, "format": 0.5}, solved_by)


def test_a_weighted_sum_keeps_its_parts_apart():
    verdicts = both("answer")([layout("4"), "#### 4", layout("5")], [example("4")] * 3)
    assert [verdict.reward for verdict in verdicts] == [2.5, 2.0, 0.5]
    assert [verdict.status for verdict in verdicts] == ["right", "right", "wrong"]
    assert [verdict.parts for verdict in verdicts] == [
        {"answer": 1.0, "format": 1.0},
        {"answer": 1.0, "format": 0.0},
        {"answer": 0.0, "format": 1.0},
    ]
    assert verdicts[0].answer == "4"


def test_without_a_judge_all_parts_must_be_right():
    verdicts = both()([layout("4"), "#### 4", "four"], [example("4")] * 3)
    assert [verdict.status for verdict in verdicts] == ["right", "wrong", "unparsed"]


def test_an_excluded_sample_earns_nothing_through_its_other_parts():
    (verdict,) = both("answer")([layout("4")], [example("?")])
    assert (verdict.reward, verdict.status) == (0.0, "excluded")


def test_nested_sums_name_their_parts():
    nested = WeightedSum({"inner": both()}, {"inner": 1.0})
    assert nested(["#### 4"], [example("4")])[0].parts == {"inner": 2.0, "inner/answer": 1.0, "inner/format": 0.0}


@pytest.mark.parametrize(
    ("rewards", "weights", "solved_by", "message"),
    [
        ({}, {}, None, "at least one"),
        ({"a": GSM8KReward()}, {"b": 1.0}, None, "same names"),
        ({"a": GSM8KReward()}, {"a": math.inf}, None, "not finite"),
        ({"a": GSM8KReward()}, {"a": 1.0}, "b", "none of the rewards"),
    ],
)
def test_a_sum_that_does_not_add_up_is_refused(rewards, weights, solved_by, message):
    with pytest.raises(ValueError, match=message):
        WeightedSum(rewards, weights, solved_by)
