"""What a data set's tests say: assertions, calls with their results, or inputs with their outputs."""

from __future__ import annotations

import ast
import base64
import binascii
import io
import json
import pickle
import re
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from dare_lightning.rewards.base import Example

Tests = Mapping[str, Any]
_MAX_PREAMBLE = 20
_CACHED = 4096


class UnreadableTestsError(ValueError):
    """The tests of a sample are missing or of no known form."""


def read_tests(example: Example) -> tuple[Tests, str]:
    """A sample's tests, and the code that its prompt begins ("" where it begins none).

    Looked for in this order: `extra["public_test_cases"]` and `extra["private_test_cases"]` (LiveCodeBench); the ground
    truth; `extra["tests"]`, `extra["test_list"]`, `extra["test"]`. Accepted forms, as values or as their JSON text:

    - a list of assertions (MBPP), with `extra["test_setup_code"]` and `extra["test_imports"]` where given;
    - Python source that defines `check(candidate)` (HumanEval); the function under test is `extra["entry_point"]`, or
      the last one that the prompt begins;
    - other Python source: it passes where it raises nothing;
    - a list of `{"input", "output"}`, with `"testtype": "functional"` and a name in `metadata` for calls (DeepCoder,
      LiveCodeBench);
    - `{"inputs", "outputs"}`, with `"fn_name"` for calls (TACO, APPS).

    Raises:
        UnreadableTestsError: none of these.
    """
    extra = example.extra
    if extra.get("public_test_cases") or extra.get("private_test_cases"):
        cases = [*_packed(extra.get("public_test_cases")), *_packed(extra.get("private_test_cases"))]
        return _cases(cases, extra), ""
    found = next((extra[key] for key in ("tests", "test_list", "test") if extra.get(key)), None)
    value = _json(example.ground_truth) if example.ground_truth else _json(found)
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return _assertions(value, extra), ""
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return _cases(value, extra), ""
    if isinstance(value, Mapping) and value.get("inputs"):
        return _columns(value), ""
    if isinstance(value, str) and value.strip():
        return _source(value, example)
    raise UnreadableTestsError("no tests")


def _json(value: Any) -> Any:
    """JSON text as what it says; anything else, Python source among it, as it is."""
    if not isinstance(value, str):
        return list(value) if isinstance(value, tuple) else value
    try:
        parsed = json.loads(value)
    except ValueError:
        return value
    return parsed if isinstance(parsed, list | dict) else value


def _assertions(lines: Sequence[str], extra: Mapping[str, Any]) -> Tests:
    imports = extra.get("test_imports") or []
    before = [str(extra["test_setup_code"])] if extra.get("test_setup_code") else []
    setup = "\n".join(map(str, imports))
    for text in (setup, *before, *lines):
        _check(text)
    return {"kind": "asserts", "setup": setup, "statements": [*before, *lines], "entry": None}


def _source(text: str, example: Example) -> tuple[Tests, str]:
    names = _check(text)
    if "check" not in names:
        return {"kind": "asserts", "setup": "", "statements": [text], "entry": None}, ""
    asked = next((m["content"] for m in reversed(example.messages) if m["role"] == "user"), "")
    prompt, defined = begun_code(str(example.extra.get("prompt") or asked))
    entry = str(example.extra.get("entry_point") or (defined[-1] if defined else ""))
    if not entry.isidentifier():
        raise UnreadableTestsError("check(candidate) without entry_point, and the prompt begins no function")
    setup = f"{prompt}\n{text}"
    return {"kind": "asserts", "setup": setup, "statements": [f"check({entry})"], "entry": entry}, prompt


def _cases(cases: Sequence[Mapping[str, Any]], extra: Mapping[str, Any]) -> Tests:
    """LiveCodeBench and DeepCoder: all of a sample's tests are of one kind."""
    name = ""
    for holder in (*cases, extra):
        metadata = _json(holder.get("metadata"))
        if isinstance(metadata, Mapping):
            name = name or str(metadata.get("func_name") or metadata.get("fn_name") or "")
    kinds = {str(case.get("testtype") or case.get("type") or "stdin") for case in cases}
    try:
        if "functional" in kinds or "function_call" in kinds:
            if not name:
                raise UnreadableTestsError("tests of a function, and nothing names it")
            calls = [[_arguments(case["input"]), [_value(case["output"])]] for case in cases]
            return {"kind": "calls", "function": name, "cases": calls}
        return {"kind": "inputs", "cases": [[_text(case["input"]), _text(case["output"])] for case in cases]}
    except (KeyError, ValueError) as error:
        raise UnreadableTestsError(f"a case without {error}") from error


def _columns(value: Mapping[str, Any]) -> Tests:
    inputs, outputs = value["inputs"], value.get("outputs") or []
    if len(inputs) != len(outputs):
        raise UnreadableTestsError(f"{len(inputs)} inputs for {len(outputs)} outputs")
    name = value.get("fn_name")
    if not name:
        pairs = zip(inputs, outputs, strict=True)
        return {"kind": "inputs", "cases": [[_text(given), _text(expected)] for given, expected in pairs]}
    calls = []
    for given, expected in zip(inputs, outputs, strict=True):
        # Some of these sets wrap a result in a list of one, some do not.
        accepted = [expected, *(expected if isinstance(expected, list) and len(expected) == 1 else [])]
        calls.append([_arguments(given), accepted])
    return {"kind": "calls", "function": str(name), "cases": calls}


def _arguments(given: Any) -> list[Any]:
    """A list of arguments, or text with one JSON value a line."""
    if isinstance(given, str):
        return [json.loads(line) for line in given.split("\n") if line.strip()]
    return list(given)


def _value(expected: Any) -> Any:
    return json.loads(expected) if isinstance(expected, str) else expected


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _packed(value: Any) -> list[Any]:
    """LiveCodeBench's cases: JSON, or JSON in a pickle that is compressed and in base 64."""
    if not value:
        return []
    parsed = _json(value)
    if isinstance(parsed, str):
        try:
            data = zlib.decompress(base64.b64decode(parsed))
        except (binascii.Error, zlib.error) as error:
            raise UnreadableTestsError(f"test cases that are neither JSON nor packed: {error}") from error
        parsed = _json(_Texts(io.BytesIO(data)).load())
    if not isinstance(parsed, list):
        raise UnreadableTestsError(f"test cases of type {type(parsed).__name__}")
    return parsed


class _Texts(pickle.Unpickler):
    """Reads pickles of plain values alone: loading a class could run anything."""

    def find_class(self, module: str, name: str) -> Any:
        raise UnreadableTestsError(f"packed test cases name {module}.{name}; they hold text only")


@lru_cache(_CACHED)
def _check(source: str) -> tuple[str, ...]:
    """Names of the functions that Python source defines at its top level."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise UnreadableTestsError(f"tests that are not Python: {error}") from error
    return tuple(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@lru_cache(_CACHED)
def begun_code(prompt: str) -> tuple[str, tuple[str, ...]]:
    """The code at the end of a prompt, after a line or two of instructions, and the functions it defines; or "", ()."""
    fenced = re.search(r"```(?:python)?\n(.*?)```", prompt, re.DOTALL)
    lines = (fenced[1] if fenced else prompt).split("\n")
    for start in range(min(len(lines), _MAX_PREAMBLE)):
        rest = "\n".join(lines[start:])
        try:
            names = _check(rest)
        except UnreadableTestsError:
            continue
        if names:
            return rest, names
    return "", ()
