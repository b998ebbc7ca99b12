from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dare_lightning.generation.completion import answer_mask
from tests.tiny import END_OF_TURN, EOS, PAD

PROMPTS = [[5 + i, 6, 7 + i] for i in range(12)]
SEEDS = list(range(12))
SHORT = {"steps": 16, "max_new_tokens": 16, "block_length": 4, "temperature": 1.0}


@pytest.fixture
def ending(policy):
    """The policy with its end tokens made likely: most answers end early, some with one token, some with the other."""
    with torch.no_grad():
        head = policy.get_parameter("model.transformer.ff_out.weight")
        hidden = policy.hidden_states(torch.tensor([[5, 6, 7] + [4] * 16])).mean((0, 1))
        head[EOS] += 2.0 * hidden / hidden.norm() ** 2
        head[END_OF_TURN] += 2.0 * hidden / hidden.norm() ** 2
    return policy


def first_end(tokens: Tensor) -> list[int]:
    ends = (tokens == EOS) | (tokens == END_OF_TURN)
    return [int(row.nonzero()[0]) if row.any() else tokens.shape[1] for row in ends]


def test_an_early_stop_changes_nothing_up_to_the_end_token_and_saves_passes(backend, ending):
    long, short = backend(**SHORT), backend(**SHORT, early_stop=True)
    whole, stopped = long.generate(PROMPTS, SEEDS), short.generate(PROMPTS, SEEDS)
    ends = first_end(whole.ids[:, 3:])
    assert any(end < 12 for end in ends)
    for row, end in enumerate(ends):
        answer = slice(3, 3 + end + 1)
        for column in ("ids", "commit_step", "commit_log_probs", "completion_mask"):
            assert torch.equal(getattr(whole, column)[row, answer], getattr(stopped, column)[row, answer]), column
    assert short.stats.row_forwards < long.stats.row_forwards
    assert short.stats.row_forwards == stopped.forward_passes.sum()
    assert long.stats.row_forwards == 12 * 16


def test_masks_left_by_an_early_stop_become_end_tokens_that_no_pass_wrote(backend, ending):
    batch = backend(**SHORT, early_stop=True).generate(PROMPTS, SEEDS)
    tokens, steps = batch.ids[:, 3:], batch.commit_step[:, 3:]
    unwritten = steps < 0
    assert bool(unwritten.any())
    assert bool((tokens[unwritten] == EOS).all())
    assert bool((batch.commit_log_probs[:, 3:][unwritten] == 0).all())
    for row, end in enumerate(first_end(tokens)):
        assert not bool(unwritten[row, : end + 1].any())
    assert torch.equal(steps.amax(1) + 1, batch.forward_passes)


def test_a_row_stays_until_everything_before_its_end_token_is_written(backend, ending):
    settings = SHORT | {"block_length": 16, "remasking": "random"}
    batch = backend(**settings, early_stop=True).generate(PROMPTS, SEEDS)
    for row, end in enumerate(first_end(batch.ids[:, 3:])):
        steps = batch.commit_step[row, 3:]
        if end < 16:
            assert int(batch.forward_passes[row]) == int(steps[: end + 1].max()) + 1


@pytest.mark.parametrize("early_stop", [False, True])
def test_end_of_text_policies(backend, ending, early_stop):
    made = {
        name: backend(**SHORT, early_stop=early_stop, eos_policy=name).generate(PROMPTS, SEEDS)
        for name in ("mask_loss", "truncate", "keep")
    }
    answer = torch.arange(16) <= torch.tensor(first_end(made["keep"].ids[:, 3:]))[:, None]
    whole = torch.ones_like(answer)
    expected = {"mask_loss": (whole, whole, answer), "truncate": (answer,) * 3, "keep": (whole,) * 3}
    for name, batch in made.items():
        masks = (batch.attention_mask, batch.response_mask, batch.completion_mask)
        for found, wanted in zip(masks, expected[name], strict=True):
            assert torch.equal(found[:, 3:], wanted), name
        assert not bool(batch.response_mask[:, :3].any())
    tail = made["truncate"]
    assert bool((tail.ids[:, 3:][~answer] == PAD).all())
    assert bool((tail.commit_step[:, 3:][~answer] == -1).all())


def test_suppressed_end_of_text_is_never_written_by_a_pass(backend, ending):
    batch = backend(**SHORT, suppress_eos=True).generate(PROMPTS, SEEDS)
    assert not bool((batch.ids[:, 3:] == EOS).any())
    assert bool((batch.ids[:, 3:] == END_OF_TURN).any())


@pytest.mark.parametrize("remasking", ["low_confidence", "entropy"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_deferred_end_tokens_are_committed_after_the_others_of_their_pass(backend, ending, temperature, remasking):
    settings = {"steps": 2, "max_new_tokens": 16, "temperature": temperature, "remasking": remasking}
    plain = backend(**settings).generate(PROMPTS, SEEDS)
    deferred = backend(**settings, defer_eos=True).generate(PROMPTS, SEEDS)

    def ends_at_once(batch):
        tokens, steps = batch.ids[:, 3:], batch.commit_step[:, 3:]
        return int(((steps == 0) & ((tokens == EOS) | (tokens == END_OF_TURN))).sum())

    assert ends_at_once(plain) > ends_at_once(deferred)


def test_an_answer_goes_up_to_its_first_stop_token():
    tokens = torch.tensor([[7, 3, 2, 7], [7, 7, 7, 7], [2, 7, 7, 3]])
    assert answer_mask(tokens, (2, 3)).int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
