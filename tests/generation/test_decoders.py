"""What every decoder keeps, whatever its parts."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest
import torch

from dare_lightning.generation.builtin import BuiltinBackend
from dare_lightning.generation.sampling import chosen_log_probs
from dare_lightning.generation.schedule import DreamSchedule, MaskRatioSchedule, OriginSchedule
from dare_lightning.generation.scores import Confidence, EndRejection, EndsLast
from dare_lightning.generation.threshold import ConfidenceThreshold
from dare_lightning.replay.batch import SequenceBatch
from tests.generation.conftest import served_policy
from tests.generation.decoders import ALL, MONOTONE, REMASKING
from tests.tiny import EOS, MASK

# The second is the longest, so that it has no padding.
PROMPTS = [[5, 6, 7], [9, 8, 10, 11, 12], [14, 15]]
SEEDS = [1, 2, 3]
UNPLANNED = {"schedule": ConfidenceThreshold(), "steps": None}


@dataclass(frozen=True)
class Made:
    """What a decoder made of the prompts, and the backend that did."""

    backend: BuiltinBackend
    batch: SequenceBatch
    hides: bool


@pytest.fixture(scope="module", params=list(ALL))
def made(request):
    settings = ALL[request.param] | {"temperature": 1.0, "early_stop": False, "max_new_tokens": 16}
    built = BuiltinBackend(**settings)
    built.update_weights(served_policy(), version=0)
    batch = built.generate(PROMPTS, SEEDS, record_states=True)
    return Made(built, batch, settings.get("running_confidence", False))


@pytest.fixture(params=list(REMASKING))
def remasking(request):
    return REMASKING[request.param] | {"temperature": 1.0, "early_stop": False}


def test_a_row_gets_what_it_would_get_alone(made):
    width = made.batch.length
    for row, (prompt, seed) in enumerate(zip(PROMPTS[:2], SEEDS, strict=False)):
        alone = made.backend.generate([prompt], [seed], record_states=True)
        passes, start = int(alone.forward_passes[0]), width - alone.length
        assert int(made.batch.forward_passes[row]) == passes
        for column in ("ids", "commit_step", "states", "proposals"):
            found = getattr(made.batch, column)[row, ..., start:]
            found = found[:passes] if found.ndim == 2 else found
            assert torch.equal(found, getattr(alone, column)[0]), column
        log_probs = made.batch.commit_log_probs[row, start:]
        torch.testing.assert_close(log_probs, alone.commit_log_probs[0], rtol=0, atol=1e-5)


def test_masks_are_written_and_nothing_else_is_touched(made):
    batch = made.batch
    for row in range(3):
        passes = int(batch.forward_passes[row])
        after = [*batch.states[row, 1:passes], batch.ids[row]]
        for before, then in zip(batch.states[row, :passes], after, strict=True):
            kept = (before != MASK) & ~(batch.response_mask[row] if made.hides else False)
            assert torch.equal(before[kept], then[kept])
            assert bool((before != then).any())
    assert not bool((batch.ids == MASK).any())


def test_every_pass_is_counted_once_and_recording_changes_nothing(made):
    batch = made.backend.generate(PROMPTS, SEEDS)
    for column in ("ids", "commit_step", "commit_log_probs", "forward_passes"):
        assert torch.equal(getattr(batch, column), getattr(made.batch, column)), column
    assert made.backend.stats.row_forwards == int(batch.forward_passes.sum())
    assert int(batch.commit_step.max()) < int(batch.forward_passes.max())


def test_commit_log_probs_are_the_policys_own_on_the_recorded_state(made):
    batch, policy = made.batch, served_policy()
    log_probs = policy(batch.states[1]).log_softmax(-1).gather(-1, batch.ids[1].expand_as(batch.states[1])[..., None])
    column = torch.arange(batch.length)[batch.response_mask[1]]
    expected = log_probs[batch.commit_step[1, column], column, 0]
    torch.testing.assert_close(batch.commit_log_probs[1, column], expected.float().detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in MONOTONE if name != "ends_last"])
def test_stopping_early_gives_the_same_answers(backend, policy, name):
    with torch.no_grad():
        head = policy.get_parameter("model.transformer.ff_out.weight")
        hidden = policy.hidden_states(torch.tensor([[5, 6, 7] + [4] * 16])).mean((0, 1))
        head[EOS] += 2.0 * hidden / hidden.norm() ** 2
    settings = MONOTONE[name] | {"temperature": 1.0}
    long, short = (backend(**settings, early_stop=stop).generate(PROMPTS, SEEDS) for stop in (False, True))
    assert torch.equal(long.completion_mask, short.completion_mask)
    assert torch.equal(long.ids[long.completion_mask], short.ids[long.completion_mask])
    assert bool((short.forward_passes <= long.forward_passes).all())


def test_tokens_hidden_again_are_those_the_policy_was_least_sure_of(backend):
    settings = {"steps": 4, "running_confidence": True, "early_stop": False, "temperature": 1.0}
    settings["score_from"] = "sampled"
    batch = backend(**settings).generate([PROMPTS[0]], [1], record_states=True)
    running = torch.zeros(batch.length)
    for step in range(3):
        hidden = batch.states[0, step] == MASK
        running[hidden] = batch.confidence[0, step][hidden]
        again = batch.states[0, step + 1] == MASK
        assert int(again.sum()) == 16 - 4 * (step + 1)
        kept = batch.response_mask[0] & ~again
        assert running[again].max() <= running[kept].min()


def test_what_is_hidden_again_is_not_said_to_follow_from_the_commit_steps(backend, remasking):
    built = backend(**remasking)
    assert not built.capabilities.commit_steps
    assert built.capabilities.states
    batch = built.generate(PROMPTS, SEEDS, record_states=True)
    rebuilt = torch.where(
        batch.commit_step[:, None] >= torch.arange(batch.states.shape[1])[:, None], MASK, batch.ids[:, None]
    )
    assert not torch.equal(rebuilt, batch.states)


def test_rejection_delays_end_tokens(backend, policy):
    with torch.no_grad():
        head = policy.get_parameter("model.transformer.ff_out.weight")
        hidden = policy.hidden_states(torch.tensor([[5, 6, 7] + [4] * 16])).mean((0, 1))
        head[EOS] += 2.0 * hidden / hidden.norm() ** 2

    def early_ends(**settings):
        batch = backend(steps=16, temperature=1.0, **settings).generate([PROMPTS[0]] * 20, list(range(20)))
        return int(((batch.commit_step < 8) & batch.response_mask & (batch.ids == EOS)).sum())

    plain = early_ends()
    assert early_ends(ends=EndRejection(0.01)) < plain
    assert early_ends(ends=EndsLast()) < plain


def test_steps_that_commit_nothing_cost_no_pass(backend):
    built = backend(steps=24, schedule=DreamSchedule())
    assert built.generate([PROMPTS[0]], [1]).forward_passes.item() <= 15
    assert built.stats.forwards <= 15


def test_origin_commits_its_share_on_average(backend):
    batch = backend(steps=4, schedule=OriginSchedule(0.0), remasking="random").generate(
        [PROMPTS[0]] * 200, list(range(200)), record_states=True
    )
    first = (batch.states[:, 1] != MASK)[:, 3:].float().mean()
    assert abs(first - 0.25) < 0.03  # 16 * 200 draws: four standard errors
    assert bool((batch.commit_step[:, 3:] >= 0).all())


@pytest.mark.parametrize(
    ("settings", "known"),
    [
        ({}, True),
        ({"temperature": 1.0, "score_from": "sampled"}, True),
        ({"temperature": 0.7}, True),
        ({"temperature": 0.7, "score_from": "sampled"}, False),
        ({"top_p": 0.5, "score_from": "sampled"}, False),
        ({"suppress_eos": True}, False),
        ({"cfg_scale": 1.0}, False),
    ],
)
def test_a_score_takes_the_log_prob_only_where_it_is_of_the_same_logits(backend, settings, known, monkeypatch):
    given = []
    original = Confidence.score

    def score(self, logits, tokens, uniform, log_probs=None):
        given.append(log_probs)
        found = original(self, logits, tokens, uniform, log_probs)
        torch.testing.assert_close(found, chosen_log_probs(logits, tokens).exp())
        return found

    monkeypatch.setattr(Confidence, "score", score)
    backend(steps=2, **settings).generate(PROMPTS, range(len(PROMPTS)))
    assert {log_probs is not None for log_probs in given} == {known}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_p": 0.0}, "top_p=0.0 must lie above 0"),
        ({"top_p": 1.5}, "top_p=1.5 must lie above 0 and not above 1"),
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"order_temperature": -1.0}, "order_temperature=-1.0 must be a finite number"),
        ({"score_from": "noisy"}, "score_from='noisy' is not one of clean, sampled"),
        ({"schedule": OriginSchedule()}, "OriginSchedule commits at random, remasking=low_confidence has no say"),
        ({"remasking": "random", "order_temperature": 0.5}, "a random order has no scores"),
        ({"remasking": "random", "score_from": "sampled"}, "a random order has no scores"),
        ({"schedule": OriginSchedule(), "remasking": "random", "defer_eos": True}, "defer_eos has no say"),
        (
            {"remasking": "entropy", "schedule": ConfidenceThreshold(), "steps": None},
            "entropy gives ConfidenceThreshold",
        ),
        ({"order_temperature": 1.0, **UNPLANNED}, "leaves ConfidenceThreshold no"),
        ({"remasking": "entropy", "ends": EndRejection()}, "ends scales probabilities, remasking=entropy has none"),
        (
            {"ends": EndRejection(), "schedule": ConfidenceThreshold(), "steps": None},
            "EndRejection grows with the planned",
        ),
        ({"ends": EndsLast(contested=True), "schedule": DreamSchedule()}, "is defined for the even schedule"),
        ({"running_confidence": True, "schedule": DreamSchedule(), "early_stop": False}, "DreamSchedule does not"),
        ({"running_confidence": True, "early_stop": True}, "no answer is finished early; set early_stop to false"),
        ({"running_confidence": True, "early_stop": False, "tree": [2]}, "set tree to null"),
        ({"running_confidence": True, "early_stop": False, "order_temperature": 0.5}, "remember noise in place of"),
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        BuiltinBackend(**{"max_new_tokens": 16, "steps": 8} | settings)


def test_settings_name_their_parts():
    built = BuiltinBackend(steps=8, max_new_tokens=16, schedule=MaskRatioSchedule("pow2"), ends=EndRejection(0.1))
    assert built.settings["schedule"] == {"name": "MaskRatioSchedule", "curve": "pow2"}
    assert built.settings["ends"]["minimum"] == 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_policy_on_the_gpu_gives_the_same_answer(made):
    built = BuiltinBackend(**{f.name: getattr(made.backend, f.name) for f in fields(made.backend)})
    built.update_weights(served_policy().cuda(), version=0)
    batch = built.generate(PROMPTS, SEEDS, record_states=True)
    for column in ("ids", "commit_step", "states", "proposals"):
        assert torch.equal(getattr(batch, column), getattr(made.batch, column)), column
