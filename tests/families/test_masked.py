"""What every masked family promises, on its tiny policy: padding, precision, gradients, files."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dare_lightning.export.policy import export_policy
from dare_lightning.families.adapters import LoRA, merged_state_dict
from dare_lightning.families.base import PolicyModel, token_log_probs, using_attention
from dare_lightning.families.checkpoint import INDEX, save_checkpoint
from dare_lightning.families.experts import split_experts
from dare_lightning.families.load import load_policy
from tests.tiny import EOS, MASK, PAD, TINY_BUILDERS

SMALLEST = {name: builder(layers=1, width=16, heads=2) for name, builder in TINY_BUILDERS.items()}
MASKED = [name for name, policy in SMALLEST.items() if policy.block_length is None]


@pytest.fixture(params=MASKED)
def build(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Makes a small policy of a family, in float64 unless told otherwise."""

    def made(dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
        return TINY_BUILDERS[request.param](layers=2, width=32, heads=2, seed=seed).to(dtype)

    return made


def random_ids(*shape: int) -> torch.Tensor:
    return torch.randint(7, 60, shape, generator=torch.Generator().manual_seed(0))


def test_it_offers_what_the_house_asks_for(build):
    policy = build()
    assert isinstance(policy, PolicyModel)
    assert (policy.mask_token_id, policy.pad_token_id, policy.eos_token_id) == (MASK, PAD, EOS)
    assert policy.block_length is None
    assert len(policy.blocks) == 2
    with pytest.raises(ValueError, match="eager, sdpa"):
        policy.attention = "flash"


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("columns", [range(4, 10), range(6), [1, 2, 5, 6, 8, 9]], ids=["left", "right", "gaps"])
def test_a_row_with_missing_tokens_gets_what_it_gets_alone(build, attention, columns):
    policy = build()
    row, ids = torch.tensor([8, 9, 20, MASK, EOS, 12]), random_ids(2, 10)
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[0] = False
    mask[0, columns] = True
    ids[0, columns] = row
    with torch.no_grad(), using_attention(policy, attention):
        together = policy(ids, mask)
        torch.testing.assert_close(together[0, mask[0]], policy(row[None])[0])
        torch.testing.assert_close(together[1], policy(ids[1:])[0])
        assert (policy(ids)[0, mask[0]] - policy(row[None])[0]).abs().max() > 1e-2


def test_a_bfloat16_row_is_not_blurred_by_its_padding(build):
    policy = build(torch.bfloat16)
    row = random_ids(1, 16)
    ids = torch.cat([torch.full((1, 300), PAD), row], 1)
    mask = torch.arange(316)[None] >= 300
    with torch.no_grad(), using_attention(policy, "eager"):
        hidden, alone = policy.hidden_states(ids, mask)[:, 300:], policy.hidden_states(row)
    assert (hidden - alone).float().norm() < 0.01 * alone.float().norm()


def test_attention_backends_agree(build):
    policy, ids = build(), random_ids(2, 9)
    plain = policy(ids)
    with using_attention(policy, "eager"):
        torch.testing.assert_close(policy(ids), plain)


def test_gradient_checkpointing_changes_no_gradient_and_keeps_less(build):
    ids, gradients, kept = random_ids(2, 9), [], []
    for flag in (False, True):
        policy, sizes = build(), []
        policy.gradient_checkpointing = flag
        pack = [lambda x, to=sizes: (to.append(x.numel()), x)[1], lambda x: x]
        with torch.autograd.graph.saved_tensors_hooks(*pack):
            score = token_log_probs(policy, ids, ids, torch.ones(2, 9).bool(), torch.ones(2, 9).bool()).sum()
        score.backward()
        gradients.append({name: weight.grad for name, weight in policy.named_parameters()})
        kept.append(sum(sizes))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
    assert all(value is not None for value in gradients[0].values())
    assert kept[1] < kept[0] / 2


def test_it_trains_under_autocast_after_inference(build):
    policy, ids = build(torch.float32), random_ids(2, 9)
    with torch.inference_mode():
        exact = policy(ids)
    with torch.autocast("cpu", torch.bfloat16):
        logits = policy(ids)
    assert (logits.float() - exact).norm() < 0.1 * exact.norm()
    logits.float().logsumexp(-1).sum().backward()
    assert all(weight.grad.dtype == torch.float32 for weight in policy.parameters())


def test_random_weights_depend_on_the_seed_alone(build):
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = build(seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.testing.assert_close(build(seed=3).state_dict(), first.state_dict(), rtol=0, atol=0)
    assert not torch.equal(build(seed=4)(random_ids(1, 4)), first(random_ids(1, 4)))


def test_a_copy_is_a_policy_of_its_own(build):
    policy, ids = build(), random_ids(1, 5)
    twin = copy.deepcopy(policy)
    torch.testing.assert_close(twin(ids), policy(ids), rtol=0, atol=0)
    twin.attention = "eager"
    assert policy.attention == "sdpa"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("limit", [10**9, 20_000], ids=["one_file", "sharded"])
def test_a_round_trip_is_bit_exact(build, tmp_path, dtype, limit):
    policy = build(dtype)
    save_checkpoint(tmp_path, policy.state_dict(), policy.config, policy.tokenizer, None, limit)
    assert (tmp_path / INDEX).exists() is (limit < 10**9)
    again = load_policy(str(tmp_path))
    assert type(again) is type(policy)
    assert again.config == policy.config | {"torch_dtype": str(dtype).removeprefix("torch.")}
    torch.testing.assert_close(again.state_dict(), policy.state_dict(), rtol=0, atol=0)
    assert again.tokenizer.get_vocab() == policy.tokenizer.get_vocab()


def test_an_adapter_starts_as_the_base_and_merges_into_published_names(build, tmp_path):
    policy, ids = build(torch.float32), random_ids(1, 6)
    base = policy(ids).detach()
    LoRA(rank=2, alpha=8.0).apply(policy)
    torch.testing.assert_close(policy(ids), base, rtol=0, atol=0)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if "lora_B" in name:
                weight.fill_(0.05)
    export_policy(policy, tmp_path / "merged")
    torch.testing.assert_close(load_policy(str(tmp_path / "merged"))(ids), policy(ids), atol=1e-4, rtol=1e-4)
    assert (policy(ids) - base).abs().max() > 1e-2
    assert set(load_file(tmp_path / "merged" / "model.safetensors")) == set(split_experts(merged_state_dict(policy)))


def test_another_family_is_refused_by_name(build, tmp_path):
    build().save_pretrained(tmp_path)
    family = type(build())
    for other in map(type, SMALLEST.values()):
        if other is not family:
            with pytest.raises(ValueError, match=f"{other.__name__} does not read; load it with .*{family.__name__}"):
                other.from_pretrained(str(tmp_path))
