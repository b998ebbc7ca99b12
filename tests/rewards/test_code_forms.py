"""Tests of programs in the forms that data sets bring: standard input, calls, packed rows."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from dare_lightning.rewards.base import Example
from dare_lightning.rewards.code import CodeReward
from dare_lightning.rewards.code_tests import UnreadableTestsError, read_tests
from tests.rewards.cases import example
from tests.rewards.hostile import EARNED
from tests.rewards.programs import make, statuses


@pytest.fixture(scope="module")
def reward() -> Iterator[CodeReward]:
    with make() as reward:
        yield reward


ADD = "a, b = map(int, input().split())\nprint(a + b)"
MAIN = "def main():\n    a, b = map(int, input().split())\n    print(a + b)\n"
CASES = [{"input": "1 2\n", "output": "3\n"}, {"input": "10 20", "output": "30"}]


@pytest.mark.parametrize(
    ("program", "status"),
    [
        (ADD, "right"),
        (f"{MAIN}if __name__ == '__main__':\n    main()", "right"),
        (f"import threading\n{MAIN}threading.Thread(target=main).start()", "right"),
        (f"{ADD}\nimport sys\nsys.exit(0)", "right"),
        ("import atexit, sys\natexit.register(print, float(sum(map(int, sys.stdin.read().split()))))", "right"),
        (f"{ADD}\nraise ValueError", "wrong"),
        ("print(3)", "wrong"),
        ("import os\nos._exit(0)", "wrong"),
        (f"{ADD}\nprint('and more')", "wrong"),
        ("import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'3')\n    except OSError: pass", "wrong"),
        ("while True: print('x' * 1000)", "wrong"),
        ("if", "unparsed"),
    ],
)  # fmt: skip
def test_programs_that_read_standard_input(reward: CodeReward, program: str, status: str) -> None:
    assert statuses(reward, [program], json.dumps(CASES)) == [status]


def test_a_large_input_arrives_whole(reward: CodeReward) -> None:
    text = "\n".join(map(str, range(300_000)))
    program = "import sys\nlines = sys.stdin.readlines()\nprint(*[int(x) for x in lines], sep='\\n')"
    assert statuses(reward, [program], json.dumps({"inputs": [text], "outputs": [text]})) == ["right"]


CALLS = {
    "livecodebench": [
        {"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional", "metadata": {"func_name": "shift"}}
    ],
    "taco": {"fn_name": "shift", "inputs": [[[1, 2], 3]], "outputs": [[[4, 5]]]},
}


@pytest.mark.parametrize("form", CALLS)
def test_calls_of_a_function_or_of_a_method_of_solution(reward: CodeReward, form: str) -> None:
    method = "class Solution:\n    def shift(self, xs: List[int], by: int):\n        return [x + by for x in xs]"
    function = "def shift(xs, by):\n    return tuple(x + by for x in xs)"
    wrong = "class Solution:\n    def shift(self, xs, by):\n        return xs"
    assert statuses(reward, [method, function, wrong], json.dumps(CALLS[form])) == ["right", "right", "wrong"]


def test_livecodebench_rows_are_read_packed_and_plain(reward: CodeReward) -> None:
    packed = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(CASES[1:])))).decode()
    row = Example([], "", {"public_test_cases": json.dumps(CASES[:1]), "private_test_cases": packed})
    assert read_tests(row)[0]["cases"] == [["1 2\n", "3\n"], ["10 20", "30"]]
    assert [v.status for v in reward([ADD, "print(3)"], [row, row])] == ["right", "wrong"]


def test_a_packed_row_cannot_run_code() -> None:
    packed = base64.b64encode(zlib.compress(pickle.dumps(Path("x")))).decode()
    with pytest.raises(UnreadableTestsError, match="hold text only"):
        read_tests(Example([], "", {"private_test_cases": packed}))


@pytest.mark.parametrize(
    "truth",
    [
        "",
        "[]",
        json.dumps(["assert f("]),
        "def check(candidate):\n    pass",
        json.dumps({"inputs": ["1"], "outputs": []}),
    ],
)
def test_unreadable_tests_are_excluded_and_named(
    reward: CodeReward, truth: str, caplog: pytest.LogCaptureFixture
) -> None:
    (verdict,) = reward([EARNED], [example(truth, 12, "mbpp")])
    assert (verdict.reward, verdict.status) == (0.0, "excluded")
    assert "mbpp[12]" in caplog.text


def test_tests_that_do_not_even_start_are_excluded(reward: CodeReward) -> None:
    truth = "import no_such_package\ndef check(candidate):\n    assert candidate(2) == 4"
    assert statuses(reward, [EARNED], truth, entry_point="f") == ["excluded"]
