import time
from fractions import Fraction

import pytest

from dare_lightning.rewards.text import last_boxed, last_hash, last_tagged, numbers_in, single_number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>4</answer>", "4"),
        ("<answer>\n4\n</answer>\n", "4"),
        ("<answer>4\n5</answer> and more", "4\n5"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<answer>1 <answer>2</answer>", "2"),
        ("<answer>1</answer></answer>", "1"),
        ("<answer>1</answer> <answer>2", "1"),
        ("<answer>2", None),
        ("2</answer>", None),
        ("", None),
    ],
)
def test_the_last_complete_answer_tag_counts(text, answer):
    assert last_tagged(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{4}", "4"),
        (r"\boxed{\frac{1}{3}} and \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{ \left\{1,2\right\} }", r"\left\{1,2\right\}"),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"{{{ \boxed{5}", "5"),
        (r"\boxed{5} }}}", "5"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\fbox{5}", "5"),
        (r"a \\{ \boxed{5}", "5"),
        (r"boxed{5}", None),
    ],
)
def test_the_last_balanced_box_counts(text, answer):
    assert last_boxed(text) == answer


def test_hash_answer_is_found_far_from_the_end():
    assert last_hash("so\n#### 42\n" + "Thanks for reading! " * 25) == "42"
    assert last_hash("#### 1\n#### 2") == "2"
    assert last_hash("####\n") is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$1,234.00", 1234),
        (r"\$1{,}234", 1234),
        ("1,234,567 dollars", 1234567),
        ("12%", 12),
        (r"12\%", 12),
        (r"18\text{ dollars}", 18),
        ("**18**", 18),
        ("-$5", -5),
        ("$-5", -5),
        ("\u22125", -5),
        ("- 5", -5),
        ("profit - 5", 5),
        (".5", Fraction(1, 2)),
        ("0.10", Fraction(1, 10)),
        ("3/4 cup", Fraction(3, 4)),
        ("3 * 6 = $18.", 18),
        ("18 = 18", 18),
        ("5km", 5),
        ("3 or 4", None),
        ("1,23", None),
        ("1/0", None),
        ("1e5", None),
        ("1.2.3", None),
        ("x2", None),
        ("\u0663", None),
        ("1\u0663", None),
        ("9" * 1000, None),
        ("none", None),
    ],
)
def test_one_number_is_read_exactly(text, value):
    assert single_number(text) == value


def test_numbers_come_in_order():
    assert numbers_in("first 3, then 4.5 and 1,000") == [3, Fraction(9, 2), 1000]


@pytest.mark.parametrize(
    "text", ["\\boxed{" * 30_000, "<answer>" * 30_000, "9" * 200_000, "1,234" * 40_000, "- " * 90_000]
)
def test_extraction_stays_linear_on_long_texts(text):
    started = time.perf_counter()
    last_boxed(text)
    last_tagged(text + "</answer>")
    last_hash(text)
    numbers_in(text)
    assert time.perf_counter() - started < 1.0
