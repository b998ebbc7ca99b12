from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dare_lightning.families.base import token_log_probs
from dare_lightning.generation.engine import FullForward
from tests.generation.conftest import scale_output
from tests.tiny import EOS, MASK, PAD, tiny_llada

# Of 3, 7 and 12 tokens; the second holds pad, end and mask tokens that are part of it, the third starts with pads.
PROMPTS = [[5, 6, 7], [9, PAD, EOS, 8, PAD, MASK, 10], [PAD, PAD, 11, 12, 13, 14, 15, 16, 17, 18, 19, EOS]]
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 1.0}


def responses(batch: Any, column: str = "ids") -> Tensor:
    """The response columns of a batch."""
    start = int(batch.response_mask.any(0).nonzero()[0])
    return getattr(batch, column)[:, start:]


@pytest.fixture
def read_canvases(policy, monkeypatch):
    """Every (ids, attention mask) that the policy reads."""
    read = []
    original = policy.hidden_states

    def reading(ids, attention_mask=None):
        read.append((ids.clone(), attention_mask))
        return original(ids, attention_mask)

    monkeypatch.setattr(policy, "hidden_states", reading)
    return read


# Diversity of a group


def test_a_group_is_diverse_above_temperature_zero_and_only_there(backend):
    policy = tiny_llada(seed=1)
    scale_output(policy, 0.01)
    group, seeds = [[5, 6, 7]] * 8, list(range(100, 108))
    hot = responses(backend(policy, temperature=1.0).generate(group, seeds))
    again = responses(backend(policy, temperature=1.0).generate(group, seeds))
    cold = responses(backend(policy, temperature=0.0).generate(group, seeds))
    assert len(hot.unique(dim=0)) >= 7
    assert len(cold.unique(dim=0)) == 1
    assert torch.equal(hot, again)


def test_a_nearly_uniform_policy_writes_every_token_equally_often(backend):
    policy = tiny_llada(seed=1)
    scale_output(policy, 0.0)
    batch = backend(policy, steps=1, temperature=1.0).generate([[5, 6]] * 400, list(range(400)))
    counts = responses(batch).flatten().bincount(minlength=40)
    expected = counts.sum() / 39
    others = torch.arange(40) != MASK
    assert counts[MASK] == 0
    assert ((counts - expected) ** 2 / expected)[others].sum() < 70.7  # 99.9 % quantile at 38 degrees of freedom


# A row and its neighbours


@pytest.mark.parametrize("cfg_scale", [0.0, 1.5])
@pytest.mark.parametrize("remasking", ["low_confidence", "random"])
@pytest.mark.parametrize("draw", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_row_gets_what_it_would_get_alone(backend, draw, remasking, cfg_scale):
    built = backend(block_length=8, remasking=remasking, cfg_scale=cfg_scale, **draw)
    together = built.generate(PROMPTS, [1, 2, 3])
    for row, (prompt, seed) in enumerate(zip(PROMPTS, [1, 2, 3], strict=True)):
        alone = built.generate([prompt], [seed])
        for column in ("ids", "commit_step"):
            assert torch.equal(responses(together, column)[row], responses(alone, column)[0]), column
        torch.testing.assert_close(
            responses(together, "commit_log_probs")[row], responses(alone, "commit_log_probs")[0], rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("max_batch_tokens", [1, 30, 60])
def test_the_result_does_not_depend_on_the_size_or_order_of_batches(backend, max_batch_tokens):
    order = [2, 0, 1]
    whole = backend(temperature=1.0).generate(PROMPTS, [1, 2, 3])
    parts = backend(temperature=1.0, max_batch_tokens=max_batch_tokens).generate(
        [PROMPTS[i] for i in order], [[1, 2, 3][i] for i in order]
    )
    assert torch.equal(whole.select(torch.tensor(order)).ids, parts.ids)
    assert torch.equal(whole.select(torch.tensor(order)).commit_step, parts.commit_step)


def test_each_prompt_is_returned_unchanged_right_before_its_response(backend):
    batch = backend().generate(PROMPTS, [1, 2, 3])
    start = int(batch.response_mask.any(0).nonzero()[0])
    assert start == 12
    for row, prompt in enumerate(PROMPTS):
        assert batch.ids[row, start - len(prompt) : start].tolist() == prompt
        assert batch.prompt_mask[row].nonzero().flatten().tolist() == list(range(start - len(prompt), start))
    assert batch.sample_index.tolist() == [0, 1, 2]
    assert batch.noise_seed.tolist() == [1, 2, 3]


def test_padding_comes_from_lengths_not_from_token_ids(backend, read_canvases):
    backend().generate(PROMPTS, [1, 2, 3])
    mask = read_canvases[0][1]
    assert mask.sum(1).tolist() == [3 + 16, 7 + 16, 12 + 16]
    read_canvases.clear()
    backend().generate([PROMPTS[1]], [2])
    assert read_canvases[0][1] is None


def test_guidance_is_the_same_with_and_without_an_attention_mask(backend):
    built = backend(cfg_scale=1.5)
    without = built.generate([PROMPTS[0]], [1])
    with_mask = built.generate([PROMPTS[0], PROMPTS[2]], [1, 3])
    assert torch.equal(responses(without)[0], responses(with_mask)[0])


def test_guided_logits_by_hand():
    conditional, unconditional = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 3.0]])
    assert FullForward(1.5).mix([conditional, unconditional]).tolist() == [[2.5, 0.5]]


def test_guidance_compares_with_a_masked_prompt(backend, policy):
    prompt = torch.tensor([[5, 6, 7]])
    masks = torch.full((1, 4), MASK)
    batch = backend(steps=1, max_new_tokens=4, cfg_scale=1.5).generate(prompt.tolist(), [0])
    conditional = policy(torch.cat([prompt, masks], 1))[:, 3:]
    unconditional = policy(torch.cat([torch.full_like(prompt, MASK), masks], 1))[:, 3:]
    guided = unconditional + 2.5 * (conditional - unconditional)
    guided[..., MASK] = -torch.inf
    assert torch.equal(responses(batch), guided.argmax(-1))


# What each forward pass does


@pytest.mark.parametrize("draw", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_every_pass_commits_masks_only_and_leaves_the_prompt_alone(backend, read_canvases, draw):
    batch = backend(steps=6, block_length=8, **draw).generate(PROMPTS, [1, 2, 3])
    canvases = [ids for ids, _ in read_canvases]
    order = [0, 1, 2]  # sorted by length already
    final = batch.ids[order]
    for before, after in zip(canvases, [*canvases[1:], final], strict=True):
        was_mask = before[:, 12:] == MASK
        is_mask = after[:, 12:] == MASK
        assert torch.equal(before[:, :12], after[:, :12])
        assert torch.equal(before[:, 12:][~was_mask], after[:, 12:][~was_mask])
        assert bool((was_mask & ~is_mask).any(1).all())
    assert not bool((final[:, 12:] == MASK).any())


def test_canvases_are_rebuilt_from_the_commit_steps(backend, read_canvases):
    batch = backend(steps=8, block_length=8, temperature=1.0).generate(PROMPTS, [1, 2, 3])
    tokens, steps = responses(batch), responses(batch, "commit_step")
    for t, (ids, _) in enumerate(read_canvases):
        assert torch.equal(ids[:, 12:], torch.where(steps >= t, MASK, tokens))
    assert bool((steps >= 0).all())


def test_blocks_are_decoded_from_the_left(backend):
    batch = backend(steps=8, block_length=4, temperature=1.0).generate(PROMPTS, [1, 2, 3])
    steps = responses(batch, "commit_step")
    assert torch.equal(steps // 2, torch.arange(16).expand(3, -1) // 4)


@pytest.mark.parametrize(
    "settings", [{}, {"cfg_scale": 1.5}, {"suppress_eos": True}], ids=["plain", "guided", "no_eos"]
)
def test_commit_log_probs_are_those_of_scoring_the_same_canvas(backend, policy, settings):
    batch = backend(steps=8, temperature=0.7, **settings).generate(PROMPTS, [1, 2, 3])
    assert batch.commit_step is not None
    scored = torch.zeros_like(batch.commit_log_probs)
    for t in range(8):
        now = batch.commit_step == t
        noisy = torch.where(batch.commit_step >= t, MASK, batch.ids)
        scored += token_log_probs(policy, noisy, batch.ids, batch.attention_mask, now).float().detach()
    torch.testing.assert_close(batch.commit_log_probs, scored, rtol=0, atol=1e-5)


def test_random_remasking_takes_positions_in_any_order(backend):
    batch = backend(steps=16, remasking="random").generate([PROMPTS[0]] * 60, list(range(60)))
    steps = responses(batch, "commit_step")
    assert len(steps.unique(dim=0)) == 60
    assert bool((steps.float().mean(0) - 7.5).abs().max() < 3.0)


def test_more_steps_than_tokens_cost_no_more_passes_than_tokens(backend):
    built = backend(steps=64, max_new_tokens=16)
    batch = built.generate([PROMPTS[0]], [1])
    assert built.stats.forwards == 16
    assert batch.forward_passes.tolist() == [16]


def test_the_cost_is_counted(backend):
    built = backend(steps=4, max_new_tokens=8)
    built.generate(PROMPTS, [1, 2, 3])
    assert vars(built.stats) == {"forwards": 4, "row_forwards": 12, "tokens": 4 * 3 * 20}
    guided = backend(steps=4, max_new_tokens=8, cfg_scale=1.0)
    batch = guided.generate(PROMPTS, [1, 2, 3])
    assert vars(guided.stats) == {"forwards": 4, "row_forwards": 24, "tokens": 2 * 4 * 3 * 20}
    assert batch.forward_passes.tolist() == [4, 4, 4]


@pytest.mark.parametrize("cfg_scale", [0.0, 1.5])
def test_the_first_pass_reads_each_prompt_of_a_group_once(backend, cfg_scale):
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[0], PROMPTS[2], PROMPTS[0]]
    together = backend(steps=4, temperature=1.0, cfg_scale=cfg_scale)
    batch = together.generate(prompts, [4, 5, 6, 7, 8])
    assert together.stats.row_forwards == (2 + 3 * 5) * (2 if cfg_scale else 1)
    assert batch.forward_passes.tolist() == [4] * 5
    alone = backend(steps=4, temperature=1.0, cfg_scale=cfg_scale, max_batch_tokens=1)
    separately = alone.generate(prompts, [4, 5, 6, 7, 8])
    assert torch.equal(batch.ids, separately.ids)
    assert torch.equal(batch.commit_step, separately.commit_step)


def test_progress_counts_denoising_steps_over_all_batches(backend):
    told = []
    backend(steps=4, max_new_tokens=8, max_batch_tokens=20).generate(
        PROMPTS[1:], [1, 2], progress=lambda done, total: told.append((done, total))
    )
    assert told == [(done, 8) for done in range(1, 9)]


# What generation leaves alone


def test_the_global_generator_is_not_touched(backend):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    backend(temperature=1.0, remasking="random").generate(PROMPTS, [1, 2, 3])
    assert torch.equal(before, torch.get_rng_state())


def test_the_policy_is_left_as_it_was(backend, policy):
    policy.train()
    policy.blocks[0].eval()
    before = [module.training for module in policy.modules()]
    batch = backend(attention="eager").generate(PROMPTS, [1, 2, 3])
    assert [module.training for module in policy.modules()] == before
    assert policy.attention == "sdpa"
    assert not batch.commit_log_probs.requires_grad


def test_the_attention_backend_does_not_change_the_answer(backend):
    eager = backend(attention="eager").generate(PROMPTS, [1, 2, 3])
    assert torch.equal(eager.ids, backend(attention="sdpa").generate(PROMPTS, [1, 2, 3]).ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_policies_generate(backend, dtype):
    policy = tiny_llada(seed=3, dtype=dtype)
    batch = backend(policy, temperature=1.0, cfg_scale=0.5).generate(PROMPTS, [1, 2, 3])
    assert batch.commit_log_probs.dtype == torch.float32
    assert all(math.isfinite(value) for value in batch.commit_log_probs.flatten().tolist())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_policy_on_the_gpu_gives_the_same_answer(backend, policy):
    settings = {"temperature": 1.0, "cfg_scale": 0.5, "block_length": 8}
    expected = backend(**settings).generate(PROMPTS, [1, 2, 3])
    found = backend(policy.cuda(), **settings).generate(PROMPTS, [1, 2, 3])
    assert torch.equal(expected.ids, found.ids)
    assert torch.equal(expected.commit_step, found.commit_step)
