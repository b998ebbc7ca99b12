from __future__ import annotations

import pytest

from dare_lightning.generation.builtin import BuiltinBackend
from tests.tiny import tiny_llada


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"max_batch_tokens": 0}, "max_batch_tokens=0 must be at least 1"),
        ({"max_new_tokens": 32, "block_length": 12}, "block_length=12 does not divide max_new_tokens=32; 8 or 16"),
        ({"max_new_tokens": 32, "block_length": 64}, "block_length=64 does not divide max_new_tokens=32; 32 would"),
        ({"max_new_tokens": 32, "block_length": 0}, "block_length=0 does not divide max_new_tokens=32; 1 would"),
        ({"steps": 10, "max_new_tokens": 32, "block_length": 8}, "steps=10 is not a multiple of the 4 blocks.*8 or 12"),
        ({"steps": 2, "max_new_tokens": 32, "block_length": 8}, "steps=2 is not a multiple of the 4 blocks.*; 4 would"),
        ({"temperature": -0.1}, "temperature=-0.1 must be a finite number, 0 or above"),
        ({"temperature": float("nan")}, "temperature=nan must be a finite number"),
        ({"cfg_scale": -1.0}, "cfg_scale=-1.0 must be a finite number"),
        ({"remasking": "purity"}, "remasking='purity' is not one of low_confidence, topk_margin, entropy, random"),
        ({"eos_policy": "drop"}, "eos_policy='drop' is not one of mask_loss, truncate, keep"),
    ],
)
def test_bad_settings_are_refused_with_the_way_out(settings, message):
    with pytest.raises(ValueError, match=message):
        BuiltinBackend(**settings)


def test_a_block_diffusion_policy_is_refused(policy):
    policy.block_length = 4
    with pytest.raises(ValueError, match=r"block-diffusion model \(block_length=4\)"):
        BuiltinBackend().validate(policy)


def test_an_unknown_attention_backend_is_refused_before_anything_runs(policy):
    with pytest.raises((ValueError, ImportError), match="nonsense"):
        BuiltinBackend(attention="nonsense").validate(policy)
    assert policy.attention == "sdpa"


@pytest.mark.parametrize(
    ("prompts", "seeds", "message"),
    [
        ([], [], "no prompts to complete"),
        ([[5, 6]], [1, 2], "1 prompts but 2 seeds"),
        ([[5], []], [1, 2], "prompt 1 has no tokens"),
    ],
)
def test_bad_prompts_are_refused(backend, prompts, seeds, message):
    with pytest.raises(ValueError, match=message):
        backend().generate(prompts, seeds)


def test_generating_without_weights_is_an_error():
    with pytest.raises(RuntimeError, match="call update_weights before generate"):
        BuiltinBackend().generate([[5]], [0])


def test_the_policy_is_used_in_place_and_later_weights_are_seen(backend, policy):
    built = backend()
    before = built.generate([[5, 6, 7]], [0]).ids
    policy.load_state_dict(tiny_llada(seed=8).state_dict())
    assert not before.equal(built.generate([[5, 6, 7]], [0]).ids)


def test_where_tokens_after_the_end_are_cut_off_no_trajectory_is_offered():
    # What the sampler read is not what training reads, so states rebuilt from steps would never have existed.
    offered = BuiltinBackend(max_new_tokens=8, block_length=1, steps=8, eos_policy="truncate").capabilities
    assert not any((offered.commit_steps, offered.states, offered.left_to_right, offered.tree))
