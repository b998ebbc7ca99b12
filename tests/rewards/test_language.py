"""GSM8K and format rewards; the cases of a completion's end."""

import pytest

from dare_lightning.rewards.format import FormatReward
from dare_lightning.rewards.gsm8k import GSM8KReward
from tests.rewards.cases import example, layout, real_examples, real_rows

GOOD = layout("4")
CHECKS = ["strict", "lenient", "tags"]


def gsm8k(completion, gold="42", **settings):
    return GSM8KReward(**settings)([completion], [example(gold)])[0]


def formatted(completion, check):
    return FormatReward(check)([completion], [example()])[0]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("completion", [GOOD, GOOD + "\n"], ids=["no_final_newline", "final_newline"])
def test_a_good_completion_gets_full_marks_with_or_without_a_final_newline(completion, check):
    verdict = formatted(completion, check)
    assert (verdict.reward, verdict.status) == (0.5, "right")
    assert gsm8k(completion, "4").reward == 1.0


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("completion", ["", "4", "<answer>4</answer>", "</answer>" * 3, GOOD.replace("</answer>", "")])
def test_a_missing_layout_never_gets_full_marks(completion, check):
    assert formatted(completion, check).reward < 0.5


def test_the_strict_check_wants_the_exact_layout():
    for broken in (
        " " + GOOD,
        GOOD + " bye",
        GOOD + "\n\n",
        GOOD.replace("\n<answer>\n4\n", "\n<answer>4"),
        GOOD + "\n" + GOOD,
        "<reasoning>\n</reasoning>\n<answer>\n</answer>",
        GOOD.replace("</reasoning>\n", "</reasoning>\n\n"),
    ):
        assert formatted(broken, "strict").reward == 0.0, broken


def test_the_lenient_check_frees_white_space_and_what_follows():
    assert formatted("\n<reasoning>a\nb</reasoning> \n\n<answer>4</answer> bye", "lenient").reward == 0.5
    assert formatted("<answer>4</answer><reasoning>a</reasoning>", "lenient").reward == 0.0
    assert formatted("<reasoning>a</reasoning> so <answer>4</answer>", "lenient").reward == 0.0


def test_tag_marks_by_hand():
    assert formatted("<reasoning>\na\n</reasoning>", "tags").reward == 0.25
    assert formatted(GOOD + "\n" + "x" * 100, "tags").reward == pytest.approx(0.4)  # 0.001 a character
    assert formatted(GOOD + "x" * 100_000, "tags").reward == 0.0
    assert formatted(GOOD + "\n" + GOOD, "tags").reward == 0.0


def test_an_unknown_check_names_the_known_ones():
    with pytest.raises(ValueError, match="strict, lenient, tags"):
        FormatReward("loose")


def test_closing_talk_after_the_hash_answer_changes_nothing():
    talk = "I hope that helps, 7 times over! " * 16
    assert len(talk) > 500
    assert gsm8k(f"#### 42\n{talk}").reward == 1.0
    assert gsm8k(f"#### 42 {talk}").reward == 1.0


@pytest.mark.parametrize(
    "marked", ["#### {}", r"\boxed{{{}}}", "<answer>{}</answer>", r"<answer>\boxed{{{}}}</answer>"]
)
@pytest.mark.parametrize("number", ["$1,234.00", "1234", "1,234 dollars", "1234.0", "6 * 205.5 + 1 = 1234"])
def test_currency_and_separators_count_as_right(marked, number):
    assert gsm8k(marked.format(number), "1234").status == "right"
    assert gsm8k(marked.format(number), "1,234").status == "right"
    assert gsm8k(marked.format(number), "1235").status == "wrong"


def test_of_two_contradictory_answers_the_last_counts():
    assert gsm8k("<answer>41</answer> wait <answer>42</answer>").status == "right"
    assert gsm8k("<answer>42</answer> wait <answer>41</answer>").status == "wrong"
    assert gsm8k("#### 41\n#### 42").status == "right"
    assert gsm8k(r"\boxed{42} \boxed{41}").status == "wrong"


def test_the_answer_tag_goes_before_hash_and_hash_before_box():
    assert gsm8k("#### 41\n<answer>42</answer>\n#### 43").status == "right"
    assert gsm8k("\\boxed{41}\n#### 42\n\\boxed{43}").status == "right"
    assert gsm8k("<answer>none</answer> #### 42").status == "unparsed"


def test_a_list_of_guesses_earns_nothing():
    guesses = " ".join(map(str, range(100)))
    assert gsm8k(f"<answer>{guesses}</answer>").status == "unparsed"
    assert gsm8k(rf"\boxed{{{guesses}}}").status == "unparsed"


def test_unmarked_answers_count_only_on_request():
    assert gsm8k("So the total is 42.").status == "unparsed"
    assert gsm8k("First 7, so the total is 42.", last_number=True).status == "right"


def test_an_unreadable_reference_is_excluded_and_named(caplog):
    verdicts = GSM8KReward()(["#### 1", ""], [example("1 or 2", 8, "gsm8k"), example("", 9, "gsm8k")])
    assert [(verdict.reward, verdict.status) for verdict in verdicts] == [(0.0, "excluded")] * 2
    assert "gsm8k[8], gsm8k[9]" in caplog.text


@pytest.mark.parametrize("name", ["rl/train/gsm8k", "rl/test/gsm8k"])
def test_real_references_are_right_in_every_layout(name):
    examples = real_examples(f"data/{name}.parquet")
    for marked in ("#### {}", r"\boxed{{{}}}", "<answer>\n${}.\n</answer>"):
        completions = [marked.format(case.ground_truth) for case in examples]
        wrong = [
            (case.ground_truth, verdict)
            for case, verdict in zip(examples, GSM8KReward()(completions, examples), strict=True)
            if verdict.status != "right"
        ]
        assert not wrong


def test_real_worked_solutions_are_right():
    rows = real_rows("data/sft/train/gsm8k.parquet", step=5)
    solutions = [row["extra_info"]["answer"] for row in rows]
    golds = [example(row["reward_model"]["ground_truth"]) for row in rows]
    assert {verdict.status for verdict in GSM8KReward()(solutions, golds)} == {"right"}
