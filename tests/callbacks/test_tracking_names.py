"""Names and values that a store can hold."""

from __future__ import annotations

import itertools

import pytest

from dare_lightning.callbacks.tracking_names import (
    MAX_NAME,
    MAX_VALUE,
    flatten,
    original_name,
    stored_name,
    stored_value,
)


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("train/loss", "train/loss"),
        ("reward/gsm8k@1", "reward/gsm8k_x40_1"),
        ("key@,", "key_x40__x2c_"),
        ("a_x40_", "a_x5f_x40_"),
        ("max_x", "max_x"),
        ("/a", "_x2f_a"),
        ("a//b/", "a/_x2f_b_x2f_"),
        ("../a", "_x2e_./a"),
        ("a:v2", "a_x3a_v2"),
        ("", "_x00_"),
    ],
)
def test_names_become_legal(name: str, stored: str) -> None:
    assert stored_name(name) == stored
    assert original_name(stored) == name


def test_no_two_short_names_meet() -> None:
    alphabet = ["_", "x", "4", "0", "@", "/", ".", "x40_"]
    names = {"".join(parts) for size in range(6) for parts in itertools.product(alphabet, repeat=size)}
    stored = {stored_name(name) for name in names}
    assert len(stored) == len(names)
    assert {original_name(name) for name in stored} == names


def test_mlflow_takes_every_stored_name() -> None:
    from mlflow.utils.validation import _validate_metric_name, _validate_param_name

    alphabet = ["a", "/", ".", "@", ",", " ", "é", "_x4"]
    for size in range(4):
        for parts in itertools.product(alphabet, repeat=size):
            _validate_metric_name(stored_name("".join(parts)))
            _validate_param_name(stored_name("".join(parts)))


def test_long_names_are_shortened_and_stay_different() -> None:
    first, second = stored_name("a" * 400 + "1"), stored_name("a" * 400 + "2")
    assert first != second
    assert len(first) <= MAX_NAME
    assert stored_name("@" * 100) != stored_name("@" * 101)


def test_long_values_say_that_they_are_cut_and_where_the_rest_is() -> None:
    text = stored_value("x" * 7000, "config.yaml")
    assert len(text) == MAX_VALUE
    assert "7000 characters" in text
    assert text.endswith("whole in config.yaml]")
    assert stored_value("x" * 6000, "config.yaml") == "x" * 6000


def test_nested_settings_get_one_name_each() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "l": [1, 2], "m": [{"n": 3}]}) == {
        "a/b": 1,
        "a/c": {},
        "l": [1, 2],
        "m/0/n": 3,
    }
