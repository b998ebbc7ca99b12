"""Which generated programs earn a reward."""

from __future__ import annotations

import ast
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dare_lightning.rewards.code import CodeReward, extract_code
from dare_lightning.rewards.code_tests import read_tests
from dare_lightning.rewards.sandbox import codec
from tests.rewards.cases import real_examples
from tests.rewards.hostile import EARNED
from tests.rewards.programs import make, statuses


@pytest.fixture(scope="module")
def reward() -> Iterator[CodeReward]:
    with make() as reward:
        yield reward


@pytest.mark.parametrize(
    ("program", "status"),
    [
        (EARNED, "right"),
        (f"Here it is:\n```python\n{EARNED}```\nDone.", "right"),
        (f"```python\n{EARNED}", "right"),
        ("def f(x):\n    return 5", "wrong"),
        ("def g(x):\n    return 4", "wrong"),
        ("def f(x):\n    return g(x)", "wrong"),
        ("raise ValueError", "wrong"),
        ("I do not know how to do this.", "unparsed"),
        ("def f(x:", "unparsed"),
        ("", "unparsed"),
        ("```python\n```", "unparsed"),
        ("(" * 10_000, "unparsed"),
    ],
)
def test_verdicts(reward: CodeReward, program: str, status: str) -> None:
    assert statuses(reward, [program]) == [status]


def test_values_cross_with_their_types(reward: CodeReward) -> None:
    values = "[1, -2.5, True, None, 'ä\\ud800', b'x', (1, [2]), {1: {2}}, frozenset({3}), 10**400, 1j, range(3), 1e999]"
    tests = [f"assert f({values}) == {values}", "assert type(f(())) is tuple and f(True) is True", "assert f([]) != ()"]
    assert statuses(reward, ["def f(x):\n    return x"], json.dumps(tests)) == ["right"]


def test_objects_of_the_program_can_be_used_but_not_compared(reward: CodeReward) -> None:
    program = (
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
        "    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)\n"
        "    def __eq__(self, other): return True\n"
        "def make(): return Stack()\ndef numbers(n): yield from range(n)\ndef fail(): raise KeyError('x')\n"
    )
    tests = [
        "s = Stack(); s.push(3); s.push('a')\nassert len(s) == 2 and s.pop() == 'a' and s.items == [3]",
        "assert make() != make() and list(numbers(3)) == [0, 1, 2] and sum(numbers(4)) == 6",
        "try:\n    fail()\nexcept KeyError:\n    caught = True\nassert caught",
    ]
    assert statuses(reward, [program], json.dumps(tests)) == ["right"]
    assert statuses(reward, [program], json.dumps(["assert make() == 3"])) == ["wrong"]


def test_a_built_ins_name_can_be_under_test(reward: CodeReward) -> None:
    tests = json.dumps(["assert sum(10, 15) == 6", "assert sum(100, 150) == 93"])
    right = "import builtins\ndef sum(a, b): return builtins.sum(i for i in range(1, a) if a % i == 0 == b % i)"
    assert statuses(reward, [right, "def sum(a, b):\n    return 6"], tests) == ["right", "wrong"]
    shadow = "def set(x):\n    return 0\ndef f(x):\n    return x"
    assert statuses(reward, [shadow], json.dumps(["assert set(f([1])) == set([2])"])) == ["wrong"]


def test_a_program_cannot_end_the_tests_own_loop(reward: CodeReward) -> None:
    tests = "def check(candidate):\n    assert all(map(lambda x: candidate(x) == 2 * x, [1, 2]))"
    cheat = "def f(x):\n    raise StopIteration"
    assert statuses(reward, [EARNED, cheat], tests, entry_point="f") == ["right", "wrong"]


def test_a_module_of_the_tests_is_not_the_programs(reward: CodeReward) -> None:
    tests = json.dumps(["assert math.isclose(f(2), 4)", "assert f(1) != math.inf"])
    cheat = "class math:\n    inf = 0\n    def isclose(a, b): return True\ndef f(x):\n    return 5"
    assert statuses(reward, [EARNED, cheat], tests) == ["right", "wrong"]
    # A function under test may be called like one.
    assert statuses(reward, ["def copy(x):\n    return x"], json.dumps(["assert copy(3) == 3"])) == ["right"]


def literal_tests(truth: str) -> list[tuple[str, str, str]]:
    """(function, arguments, result) of the assertions `f(literals) == literal`."""
    found = []
    for line in json.loads(truth):
        test = ast.parse(line).body[0]
        assert isinstance(test, ast.Assert)
        compared = test.test
        if not isinstance(compared, ast.Compare) or not isinstance(compared.left, ast.Call):
            continue
        call, result = compared.left, compared.comparators[0]
        try:
            values = [ast.literal_eval(node) for node in (*call.args, result)]
        except ValueError:
            continue
        if isinstance(call.func, ast.Name) and not call.keywords:
            found.append((call.func.id, repr(values[:-1]), repr(values[-1])))
    return found


def test_real_mbpp_rows_tell_right_from_wrong(reward: CodeReward) -> None:
    right, wrong, rows = [], [], []
    for case in real_examples("data/rl/test/mbpp.parquet", step=40):
        tests = literal_tests(case.ground_truth)
        if len(tests) < len(json.loads(case.ground_truth)):
            continue
        table = ", ".join(f"{arguments!r}: {result}" for _, arguments, result in tests)
        program = f"[BEGIN]\n 'def {tests[0][0]}(*args):\r\n    return {{{table}}}[repr(list(args))]' \n[DONE] \n"
        right.append(program)
        wrong.append(program.replace(f": {tests[-1][2]}}}", ": 'another'}"))
        rows.append(case)
    assert len(rows) >= 5
    verdicts = reward([*right, *wrong], [*rows, *rows])
    assert [verdict.status for verdict in verdicts] == ["right"] * len(rows) + ["wrong"] * len(rows)


SOLVED = {
    2: ["    return number % 1.0", "def truncate_number(number):\n    return number - int(number)"],
    4: ["    m = sum(numbers) / len(numbers)\n    return sum(abs(x - m) for x in numbers) / len(numbers)"],
    38: ["    return encode_cyclic(encode_cyclic(s))"],
    50: ["    return ''.join(chr((ord(c) - 5 - ord('a')) % 26 + ord('a')) for c in s)"],
    53: ["```python\ndef add(x: int, y: int):\n    return x + y\n```"],
}


def test_real_humaneval_rows_take_a_body_or_a_whole_function(reward: CodeReward) -> None:
    examples = real_examples("data/rl/test/humaneval.parquet")
    pairs = [(body, examples[index]) for index, bodies in SOLVED.items() for body in bodies]
    assert [v.status for v in reward([b for b, _ in pairs], [e for _, e in pairs])] == ["right"] * len(pairs)
    stubs = reward(["    return None"] * len(pairs), [e for _, e in pairs])
    assert {v.status for v in stubs} == {"wrong"}
    assert {read_tests(e)[0]["entry"] is not None for e in examples} == {True}


def test_a_helper_of_the_prompt_is_the_prompts(reward: CodeReward) -> None:
    row = real_examples("data/rl/test/humaneval.parquet")[32]  # checks abs(poly(xs, find_zero(xs))) < 1e-4
    cheat = "def poly(xs, x):\n    return 0\ndef find_zero(xs):\n    return 1.0"
    assert reward([cheat], [row])[0].status == "wrong"


# Pieces.


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x = 1", "x = 1"),
        ("    return 1\n", "    return 1\n"),
        ("```python\na\n```\n```py\nb\n```\n", "b\n"),
        ("```\na\n```\n```text\nb\n```", "a\n"),
        ("```python\na\n```\n```text\nb\n```", "a\n"),
        ("see\n```python\na = '''\nb\n'''", "a = '''\nb\n'''"),
        ("[BEGIN]\n 'def f():\r\n  pass' \n[DONE] \n\n ", "def f():\r\n  pass"),
        (" 'x = 1' \n[DONE] junk", "x = 1"),
        ("```json\n{}\n```", "```json\n{}\n```"),
    ],
)
def test_extraction(text: str, code: str) -> None:
    assert extract_code(text) == code


@pytest.mark.parametrize("filling", ["a", " ", "`", "```\n", "```a ", "[BEGIN]", "[DONE]"])
def test_extraction_takes_no_longer_than_the_text_is(filling: str) -> None:
    started = time.perf_counter()
    extract_code(f"```{filling * 20_000}`x")
    assert time.perf_counter() - started < 1.0


@pytest.mark.parametrize(
    "message",
    [
        {},
        ["list"],
        ["list", 3],
        ["eval", "1"],
        ["int", "zz"],
        ["set", [["list", []]]],
        ["type", "print"],
        ["dict", [1]],
    ],
)
def test_what_is_no_value_is_refused(message: Any) -> None:
    with pytest.raises(codec.FrameError):
        codec.decode(message, lambda number: number)
