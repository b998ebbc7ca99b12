from __future__ import annotations

import json

import pytest
import torch

from dare_lightning.generation.builtin import BuiltinBackend
from dare_lightning.generation.schedule import Place
from dare_lightning.generation.threshold import ConfidenceFactor, ConfidenceThreshold, QuotaThreshold
from tests.shared import golden_files


def select(policy, score: list[float], open_: list[bool], block_masks: int = 0, step: int = 0, steps: int = 0):
    place = Place(*(torch.tensor([n]) for n in (block_masks, step, steps, 0)))
    return policy.select(torch.tensor([score]), torch.tensor([open_]), place)[0].int().tolist()


@pytest.mark.parametrize("path", golden_files("generation/units-masked.json"))
def test_selections_are_the_published_ones(path):
    for case in json.loads(path.read_text())["selection"]["cases"]:
        score, open_ = case["confidence"], [bool(m) for m in case["masked"]]
        for name, expected in case.items():
            rule, _, value = name.rpartition("_")
            if rule == "fastdllm_threshold":
                assert select(ConfidenceThreshold(float(value)), score, open_) == expected, name
            elif rule == "factor":
                assert select(ConfidenceFactor(float(value), accept_last_refused=True), score, open_) == expected, name


def test_a_refused_last_position_is_not_accepted_by_default():
    score, open_ = [0.99, 0.98, 0.2], [True] * 3
    assert select(ConfidenceFactor(0.5), score, open_) == [1, 1, 0]
    assert select(ConfidenceFactor(0.5, accept_last_refused=True), score, open_) == [1, 1, 1]


def test_what_is_not_sure_enough_is_owed_to_the_next_steps():
    policy = QuotaThreshold(0.5)
    assert select(policy, [0.9, 0.4, 0.8, 0.3], [True] * 4, 4, 0, 2) == [1, 0, 1, 0]
    assert select(policy, [0.1, 0.4, 0.2, 0.3], [True] * 4, 4, 0, 2) == [0, 1, 0, 0]
    assert select(policy, [0.6, 0.0, 0.7, 0.8], [True, False, True, True], 4, 1, 2) == [1, 0, 1, 1]
    assert select(policy, [0.1, 0.0, 0.3, 0.2], [True, False, True, True], 4, 9, 2) == [0, 0, 1, 0]


@pytest.mark.parametrize("schedule", [ConfidenceThreshold(0.0), ConfidenceFactor(100.0)])
def test_a_policy_that_is_always_sure_enough_takes_one_pass_a_block(backend, schedule):
    built = backend(steps=None, block_length=4, schedule=schedule)
    assert built.generate([[5, 6, 7]], [1]).forward_passes.tolist() == [4]


@pytest.mark.parametrize("schedule", [ConfidenceThreshold(1.0), ConfidenceFactor(1e-9)])
def test_a_policy_that_is_never_sure_enough_goes_on_one_token_a_pass(backend, schedule):
    built = backend(steps=None, block_length=4, schedule=schedule)
    even = backend(steps=16, block_length=4)
    found, expected = (b.generate([[5, 6, 7], [9, 10]], [1, 2]) for b in (built, even))
    assert torch.equal(found.ids, expected.ids)
    assert torch.equal(found.commit_step, expected.commit_step)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": ConfidenceThreshold(), "steps": 8}, "steps=8 means nothing to ConfidenceThreshold.*to null"),
        (
            {"schedule": ConfidenceFactor(), "remasking": "random"},
            "random gives ConfidenceFactor no probabilities",
        ),
        ({"schedule": QuotaThreshold(), "steps": 5}, "steps=5 does not divide max_new_tokens=16"),
    ],
)
def test_settings_without_meaning_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        BuiltinBackend(max_new_tokens=16, **settings)


@pytest.mark.parametrize("threshold", [-0.1, 1.5, float("nan")])
def test_thresholds_that_are_no_probabilities_are_refused(threshold):
    with pytest.raises(ValueError, match=r"threshold=.* must lie in \[0, 1\]"):
        ConfidenceThreshold(threshold)
    with pytest.raises(ValueError, match=r"threshold=.* must lie in \[0, 1\]"):
        QuotaThreshold(threshold)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("inf")])
def test_factors_that_accept_nothing_or_everything_are_refused(factor):
    with pytest.raises(ValueError, match=r"factor=.* must be a finite number above 0"):
        ConfidenceFactor(factor)
