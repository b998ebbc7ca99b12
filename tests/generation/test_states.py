"""What every pass read and proposed, and how it follows from the commit steps where nothing is hidden again."""

from __future__ import annotations

import pytest
import torch

from dare_lightning.generation.threshold import ConfidenceThreshold
from tests.generation.decoders import MONOTONE
from tests.tiny import MASK

PROMPTS = [[5, 6, 7], [9, 8, 10, 11, 12], [14, 15]]
SEEDS = [1, 2, 3]


@pytest.fixture(params=list(MONOTONE))
def decoder(request):
    return MONOTONE[request.param] | {"temperature": 1.0}


def test_recorded_states_equal_those_rebuilt_from_the_commit_steps(backend, decoder):
    batch = backend(**decoder).generate(PROMPTS, SEEDS, record_states=True)
    passes = batch.forward_passes
    assert batch.states.shape == (3, int(passes.max()), batch.length)
    for row in range(3):
        for step in range(int(passes[row])):
            rebuilt = torch.where(batch.commit_step[row] >= step, MASK, batch.ids[row])
            assert torch.equal(batch.states[row, step], rebuilt)
        assert not bool(batch.states[row, int(passes[row]) :].any())


def test_nothing_is_recorded_unless_asked_for(backend):
    batch = backend().generate(PROMPTS, SEEDS)
    assert batch.states is None
    assert batch.proposals is None
    assert batch.confidence is None


def test_proposals_fill_every_mask_and_hold_what_is_committed(backend, decoder):
    batch = backend(**decoder).generate(PROMPTS, SEEDS, record_states=True)
    made = torch.arange(batch.states.shape[1]) < batch.forward_passes[:, None]
    was_mask = (batch.states == MASK) & made[..., None]
    assert not bool((batch.proposals == MASK).any())
    assert torch.equal(batch.proposals[~was_mask], batch.states[~was_mask])
    assert bool((batch.confidence[was_mask] > 0).all())
    assert not bool(batch.confidence[~was_mask].any())
    for step in range(batch.states.shape[1]):
        now = batch.commit_step == step
        assert torch.equal(batch.proposals[:, step][now], batch.ids[now])


def test_the_commits_of_the_passes_are_a_partition_of_the_response(backend, decoder):
    batch = backend(**decoder).generate(PROMPTS, SEEDS)
    for row in range(3):
        steps = batch.commit_step[row][batch.response_mask[row]]
        assert steps.unique().tolist() == list(range(int(batch.forward_passes[row])))


def test_confidence_is_the_probability_at_the_temperature_of_the_draw(backend, policy):
    batch = backend(steps=2, max_new_tokens=4, temperature=0.5).generate([PROMPTS[0]], [1], record_states=True)
    for step in range(2):
        probabilities = (policy(batch.states[:, step]) / 0.5).softmax(-1)
        expected = probabilities.gather(-1, batch.proposals[:, step, :, None]).squeeze(-1)
        hidden = batch.states[:, step] == MASK
        torch.testing.assert_close(batch.confidence[:, step][hidden], expected[hidden].float().detach())


def test_batches_of_several_sizes_are_joined(backend):
    settings = {"steps": None, "schedule": ConfidenceThreshold(0.3), "temperature": 1.0}
    whole = backend(**settings).generate(PROMPTS, SEEDS, record_states=True)
    parts = backend(**settings, max_batch_tokens=1).generate(PROMPTS, SEEDS, record_states=True)
    for column in ("states", "proposals"):
        assert torch.equal(getattr(whole, column), getattr(parts, column))


def test_truncated_answers_have_truncated_states(backend, policy):
    batch = backend(steps=8, temperature=1.0, eos_policy="truncate").generate(PROMPTS, SEEDS, record_states=True)
    absent = ~(batch.response_mask | batch.prompt_mask)
    assert not bool(batch.confidence.masked_select(absent[:, None].expand_as(batch.confidence)).any())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"steps": 16, "block_length": 1}, True),
        ({"steps": 8, "block_length": 8}, False),
        ({"steps": 16}, False),
    ],
)
def test_left_to_right_is_said_of_blocks_of_one_token(backend, settings, expected):
    built = backend(**settings)
    assert built.capabilities.left_to_right is expected
    assert built.capabilities.states
    assert not built.capabilities.tree
    steps = built.generate([PROMPTS[0]], [1]).commit_step[0, 3:]
    assert (steps.tolist() == list(range(16))) is expected
