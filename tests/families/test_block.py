"""What every block-diffusion family promises: one rule of visibility, nothing computed in vain, strict files."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dare_lightning.export.policy import export_policy
from dare_lightning.families import tiny
from dare_lightning.families.adapters import LoRA
from dare_lightning.families.attention import View
from dare_lightning.families.base import PolicyModel, token_log_probs, using_attention
from dare_lightning.families.block import count_blocks
from dare_lightning.families.checkpoint import save_checkpoint
from dare_lightning.families.experts import split_experts
from dare_lightning.families.llada2 import LLaDA2
from dare_lightning.families.load import find_family, load_policy
from dare_lightning.families.sdar import SDAR
from dare_lightning.families.sdar_moe import SDARMoE
from dare_lightning.families.tokenizer import load_tokenizer
from dare_lightning.families.visibility import BlockVisibility
from tests.shared import shared_file
from tests.tiny import EOS, MASK, PAD, TINY_BUILDERS

BLOCK = [name for name, builder in TINY_BUILDERS.items() if builder(layers=1, width=16, heads=2).block_length]


@pytest.fixture(params=BLOCK)
def build(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Makes a small policy of a family with blocks of 4, in float64 unless told otherwise."""

    def made(dtype: torch.dtype = torch.float64, layers: int = 2) -> Any:
        return TINY_BUILDERS[request.param](layers=layers, width=16, heads=2).to(dtype)

    return made


def sample(columns: int = 15) -> tuple[Tensor, Tensor, Tensor]:
    """Noisy and clean ids and existence: three noisy copies of a left-padded row, two of a row of whole blocks."""
    stream = torch.Generator().manual_seed(0)
    clean = torch.randint(7, 60, (5, columns), generator=stream)
    clean[1] = clean[2] = clean[0]
    clean[4] = clean[3]
    exists = torch.ones_like(clean, dtype=torch.bool)
    exists[:3, :2] = False
    exists[3:, 12:] = False
    hidden = (torch.rand(5, columns, generator=stream) < 0.4) & exists
    hidden[:, :7] = False
    hidden[1, :11] = False
    hidden[2] = exists[2]
    return clean.masked_fill(hidden, MASK), clean, exists


def dense(policy: Any, noisy: Tensor, clean: Tensor, exists: Tensor) -> Tensor:
    """States of the noisy half from one pass over [noisy ; clean], with every pair of the mask written out."""
    block = count_blocks(clean, exists, policy.block_length)
    same, later = block[:, :, None] == block[:, None], block[:, :, None] > block[:, None]
    pairs = torch.cat([torch.cat([same, later], 2), torch.cat([torch.zeros_like(same), same | later], 2)], 1)
    there = torch.cat([exists, exists], 1)
    position = (exists.cumsum(1) - 1).clamp(min=0).repeat(1, 2)
    view = View(position, pairs & there[:, None] & there[:, :, None])
    with using_attention(policy, "eager"):
        return policy.hidden_states(torch.cat([noisy, clean], 1), None, view)[:, : noisy.shape[1]]


def test_it_offers_what_the_house_asks_for(build: Any) -> None:
    policy = build()
    assert isinstance(policy, PolicyModel)
    assert (policy.mask_token_id, policy.pad_token_id, policy.eos_token_id) == (MASK, PAD, EOS)
    assert (policy.block_length, policy.left_context, len(policy.blocks)) == (4, 0, 2)


@pytest.mark.parametrize("attention", ["eager", "sdpa", "varlen"])
def test_denoising_equals_the_dense_pass_and_so_do_its_gradients(
    build: Any, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dare_lightning.families.visibility.QUERIES", 8)
    noisy, clean, exists = sample()
    outcomes = []
    for run in (dense, lambda policy, *rows: policy.denoise(*rows)):
        policy = build()
        with using_attention(policy, attention):
            states = run(policy, noisy, clean, exists)[exists]
            policy.logits(states).logsumexp(-1).square().sum().backward()
        outcomes.append((states.detach(), {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}))
    torch.testing.assert_close(outcomes[1], outcomes[0])


def test_what_was_noised_alone_is_read_twice(build: Any) -> None:
    policy, (noisy, clean, exists), read = build(), sample(), []
    embed = next(module for module in policy.modules() if isinstance(module, torch.nn.Embedding))
    embed.register_forward_hook(lambda module, inputs, output: read.append(inputs[0].shape))
    scored = (noisy == MASK) & (torch.arange(15) >= 11)
    expected = dense(policy, noisy, clean, exists)
    read.clear()
    found = token_log_probs(policy, noisy, clean, exists, scored)
    # Scored are the last two blocks of the first sequence, tokens 8 to 12: their five tokens are read in each of its
    # three noisy rows, and the twelve clean tokens before the last block once for all of them.
    assert read == [torch.Size([1, 12 + 3 * 5])]
    by_hand = policy.logits(expected[scored]).log_softmax(-1).gather(-1, clean[scored][:, None])[:, 0]
    torch.testing.assert_close(found[scored], by_hand)


def test_rows_that_score_nothing_still_give_every_parameter_a_gradient_of_zero(build: Any) -> None:
    policy, (noisy, clean, exists) = build(), sample()
    found = token_log_probs(policy, noisy, clean, exists, torch.zeros_like(exists))
    found.sum().backward()
    assert not found.any()
    assert all(weight.grad is not None and not weight.grad.any() for weight in policy.parameters())


def test_a_row_gets_what_it_gets_alone(build: Any) -> None:
    policy, (noisy, clean, exists) = build(), sample()
    together = policy.denoise(noisy, clean, exists)
    for row in range(len(noisy)):
        own = exists[row]
        alone = policy.denoise(noisy[row, own][None], clean[row, own][None])
        torch.testing.assert_close(together[row, own], alone[0])
        plain = policy.hidden_states(clean[row : row + 1], own[None])[0, own]
        torch.testing.assert_close(plain, policy.hidden_states(clean[row, own][None])[0])


def test_packed_samples_get_what_they_get_in_rows_of_their_own(build: Any) -> None:
    policy, (noisy, clean, exists) = build(), sample()
    block = count_blocks(clean, exists, 4)
    together = policy.denoise(*(part[[0, 3]].flatten()[None] for part in (noisy, clean, exists, block)))
    torch.testing.assert_close(together[0, :15], policy.denoise(noisy[:1], clean[:1], exists[:1])[0])
    torch.testing.assert_close(together[0, 15:], policy.denoise(noisy[3:4], clean[3:4], exists[3:4])[0])


def test_packed_samples_are_scored_apart_wherever_their_scored_tokens_lie(build: Any) -> None:
    policy, (_, clean, _) = build(), sample()
    exists, scored = torch.ones(2, 8, dtype=torch.bool), torch.zeros(2, 8, dtype=torch.bool)
    scored[:, 1] = True
    clean = clean[[0, 3], :8]
    noisy, block = clean.masked_fill(scored, MASK), count_blocks(clean, exists, 4)
    apart = token_log_probs(policy, noisy, clean, exists, scored)
    packed = [part.flatten()[None] for part in (noisy, clean, exists, scored, block)]
    together = token_log_probs(policy, *packed[:4], block_ids=packed[4])
    torch.testing.assert_close(together.view(2, 8), apart)


def test_blocks_may_be_counted_from_the_response(build: Any) -> None:
    policy, (noisy, clean, exists) = build(), sample()
    block = torch.where(exists, (torch.arange(15) + 1) // 4, -1)
    states = policy.denoise(noisy, clean, exists, block)
    assert (states - policy.denoise(noisy, clean, exists)).abs().max() > 1e-3
    changed = clean.clone()
    changed[:, 11:] = 9
    again = policy.denoise(torch.where(block < 3, noisy, 9), changed, exists, block)
    torch.testing.assert_close(again[:, :11], states[:, :11])


def test_gradient_checkpointing_changes_no_gradient(build: Any) -> None:
    gradients = []
    for flag in (False, True):
        policy = build()
        policy.gradient_checkpointing = flag
        policy.denoise(*sample()).sum().backward()
        gradients.append({n: p.grad for n, p in policy.named_parameters() if p.grad is not None})
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


def test_an_adapter_starts_as_the_base(build: Any) -> None:
    policy, ids = build(torch.float32), torch.arange(7, 16)[None]
    base = policy(ids).detach()
    report = LoRA(rank=2, alpha=8.0).apply(policy)
    torch.testing.assert_close(policy(ids), base, rtol=0, atol=0)
    assert {name.rpartition(".")[2] for name in report.layers} == set(policy.lora_targets)


@pytest.mark.parametrize("limit", [10**9, 10_000], ids=["one_file", "sharded"])
def test_a_round_trip_is_bit_exact_and_keeps_wide_router_biases(build: Any, tmp_path: Path, limit: int) -> None:
    policy = build(torch.bfloat16)
    for name, buffer in policy.named_buffers():
        policy.get_submodule(name.rpartition(".")[0]).expert_bias = torch.linspace(-0.1, 0.1, len(buffer))
    save_checkpoint(tmp_path, policy.state_dict(), policy.config, policy.tokenizer, None, limit)
    for dtype in (None, "bfloat16"):
        again = load_policy(str(tmp_path), dtype=dtype)
        assert type(again) is type(policy)
        torch.testing.assert_close(again.state_dict(), policy.state_dict(), rtol=0, atol=0)
    assert again.config == policy.config | {"torch_dtype": "bfloat16"}
    assert again.block_length == 4


def test_an_export_in_a_narrow_dtype_keeps_wide_router_biases(tmp_path: Path) -> None:
    policy = tiny.new_tiny_llada2(layers=2, width=16, heads=2)
    policy.model.layers[1].mlp.gate.expert_bias.fill_(1 / 3)
    export_policy(policy, tmp_path / "exported", dtype="bfloat16")
    written = load_file(tmp_path / "exported" / "model.safetensors")
    bias = "model.layers.1.mlp.gate.expert_bias"
    assert {value.dtype for name, value in written.items() if name != bias} == {torch.bfloat16}
    torch.testing.assert_close(written[bias], torch.full((4,), 1 / 3), rtol=0, atol=0)


def test_every_pair_of_the_rule_of_visibility() -> None:
    block, copy = torch.tensor([[0, 1, 1, -1, 0, 1, 1]]), torch.tensor([[0, 0, 0, 0, 1, 1, 2]])
    expected = [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [0, 0, 0, 1, 0, 0, 0],  # padding sees padding
        [0, 0, 0, 0, 1, 0, 0],
        [1, 0, 0, 0, 0, 1, 0],  # another noisy copy is never seen
        [1, 0, 0, 0, 0, 0, 1],
    ]
    assert BlockVisibility(block, copy).pairs()[0].int().tolist() == expected


@cache
def sdar_tokenizer() -> Any:
    """The published tokenizer, which the dense and the sparse model share."""
    return load_tokenizer(shared_file("published/SDAR-8B-Chat"))


@pytest.mark.parametrize("name", ["SDAR-8B-Chat", "SDAR-30B-A3B-Chat", "LLaDA2.0-mini", "LLaDA2.1-mini"])
def test_the_published_model_has_the_published_tensors(name: str) -> None:
    folder = shared_file(f"published/{name}")
    config = json.loads((folder / "config.json").read_text())
    sdar = name.startswith("SDAR")
    tokenizer = sdar_tokenizer() if sdar else tiny.character_tokenizer()
    with torch.device("meta"):
        policy = find_family(config, folder)(config, tokenizer, mask_token_id=None if sdar else 156895)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shapes = split_experts(policy.state_dict())
    assert set(shapes) == set(index["weight_map"])
    wide = {"LLaDA2.1-mini": 4}.get(name, 2)
    size = sum(v.numel() * (wide if n.endswith("expert_bias") else 2) for n, v in shapes.items())
    assert size == index["metadata"]["total_size"]
    assert policy.config == config
    assert (policy.block_length, policy.mask_token_id) == ((4, 151669) if sdar else (32, 156895))
    if sdar:
        assert policy.stop_token_ids == (151643, 151645)
        text = "<|im_start|>user\nWhat is 12*3?<|im_end|>\n"
        turn = [{"role": "user", "content": "What is 12*3?"}]
        assert tokenizer.apply_chat_template(turn, tokenize=False) == text
        assert tokenizer(text)["input_ids"][0] == 151644


def test_merged_experts_are_read_and_saved_one_by_one(tmp_path: Path) -> None:
    policy = tiny.new_tiny_llada2(layers=2, width=16, heads=2)
    policy.save_pretrained(tmp_path / "published")
    published = load_file(tmp_path / "published" / "model.safetensors")
    config = policy.config | {"model_type": "llada2_moe_veomni"}
    (tmp_path / "published").rename(tmp_path / "merged")
    (tmp_path / "merged" / "config.json").write_text(json.dumps(config))
    save_file(dict(policy.state_dict()), tmp_path / "merged" / "model.safetensors")
    merged = load_policy(str(tmp_path / "merged"))
    torch.testing.assert_close(merged.state_dict(), policy.state_dict(), rtol=0, atol=0)
    merged.save_pretrained(tmp_path / "again")
    assert set(load_file(tmp_path / "again" / "model.safetensors")) == set(published)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["model_type"] == "llada2_moe"


@pytest.mark.parametrize("builder", [tiny.new_tiny_sdar_moe, tiny.new_tiny_llada2], ids=["sdar_moe", "llada2"])
def test_a_missing_expert_or_shard_is_named_and_nothing_is_loaded(builder: Any, tmp_path: Path) -> None:
    policy = builder(layers=2, width=16, heads=2)
    save_checkpoint(tmp_path, policy.state_dict(), policy.config, policy.tokenizer, None, 10_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    lost = "model.layers.1.mlp.experts.2.up_proj.weight"
    shard = tmp_path / index["weight_map"].pop(lost)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    kept = load_file(shard)
    del kept[lost]
    save_file(kept, shard)
    with pytest.raises(ValueError, match=f"1 missing: {lost}"):
        load_policy(str(tmp_path))
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks {shard.name}"):
        load_policy(str(tmp_path))


def read_with(policy: Any, folder: Path, changes: dict[str, Any], **options: Any) -> Any:
    policy.save_pretrained(folder)
    config = {key: value for key, value in (policy.config | changes).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))
    return load_policy(str(folder), **options)


def test_the_block_length_is_the_checkpoints_or_must_be_given(tmp_path: Path) -> None:
    policy = tiny.new_tiny_sdar(layers=1, width=16, heads=2)
    with pytest.raises(ValueError, match=r"lacks block_size.*model\.block_length"):
        read_with(policy, tmp_path, {"block_size": "absent"})
    given = read_with(policy, tmp_path, {"block_size": "absent"}, block_length=8)
    assert (given.block_length, given.config["block_size"]) == (8, 8)
    with pytest.raises(ValueError, match=r"model\.block_length=8.*block_size=4"):
        read_with(policy, tmp_path, {}, block_length=8)
    with pytest.raises(ValueError, match="block_size=0.*positive whole number"):
        read_with(policy, tmp_path, {"block_size": 0})
    with pytest.raises(ValueError, match=r"model\.block_length=0 must be at least 1"):
        read_with(policy, tmp_path, {"block_size": "absent"}, block_length=0)


@pytest.mark.parametrize(("builder", "published"), [(tiny.new_tiny_sdar_moe, 4), (tiny.new_tiny_llada2, 32)])
def test_families_whose_config_is_silent_take_the_published_length(
    builder: Any, published: int, tmp_path: Path
) -> None:
    policy = builder(layers=2, width=16, heads=2, block_length=16)
    assert read_with(policy, tmp_path, {"block_size": "absent"}).block_length == published
    given = read_with(policy, tmp_path, {"block_size": "absent"}, block_length=8)
    given.save_pretrained(tmp_path / "given")
    assert load_policy(str(tmp_path / "given")).block_length == 8


@pytest.mark.parametrize(("mask", "message"), [(EOS, "also ends an answer"), (PAD, "padding"), (5000, "outside")])
def test_a_mask_token_with_another_role_is_refused(mask: int, message: str, tmp_path: Path) -> None:
    policy = tiny.new_tiny_sdar(layers=1, width=16, heads=2)
    with pytest.raises(ValueError, match=message):
        read_with(policy, tmp_path, {"mask_token_id": mask})
    with pytest.raises(ValueError, match=message):
        read_with(policy, tmp_path, {"mask_token_id": "absent"}, mask_token_id=mask)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("sdar", {"attention_bias": True}, "attention_bias=True.*SDAR here supports False"),
        ("sdar", {"head_dim": "absent"}, "lacks head_dim"),
        ("sdar_moe", {"mlp_only_layers": [7]}, r"mlp_only_layers=\[7\].*num_hidden_layers=2"),
        ("sdar_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok=9.*num_experts=4"),
        ("llada2", {"n_group": 3}, "num_experts=4, n_group=3.*groups must be equal"),
        ("llada2", {"num_experts_per_tok": 3}, "num_experts_per_tok=3"),
        ("llada2", {"use_qk_norm": False}, "use_qk_norm=False"),
        ("llada2", {"partial_rotary_factor": 1.5}, r"partial_rotary_factor=1\.5"),
        ("llada2", {"first_k_dense_replace": -1}, "first_k_dense_replace=-1"),
    ],
    ids=str,
)
def test_an_unsupported_config_value_is_named(family: str, changes: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read_with(TINY_BUILDERS[family](layers=2, width=16, heads=2), tmp_path, changes)


def test_dense_layers_may_lie_between_sparse_ones() -> None:
    config = tiny.sdar_moe_config(4, 16, 2, 4, 2, 4, 103) | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}
    policy = SDARMoE.from_config(config, tiny.character_tokenizer(), seed=0)
    assert policy.arch.sparse == (False, False, False, True)
    assert policy(torch.arange(7, 12)[None]).isfinite().all()


@pytest.mark.parametrize(
    ("config", "family"),
    [
        ({"model_type": "sdar"}, SDAR),
        ({"architectures": ["SDARForCausalLM"]}, SDAR),
        ({"model_type": "sdar_moe", "num_experts": 8}, SDARMoE),
        ({"model_type": "llada2_moe", "architectures": ["LLaDA2MoeModelLM"], "num_experts": 8}, LLaDA2),
        ({"model_type": "llada21_moe", "num_experts": 8}, LLaDA2),
        ({"architectures": ["LLaDA2MoeModelLM"], "num_experts": 8}, LLaDA2),
    ],
    ids=str,
)
def test_model_type_and_architecture_decide_the_family(config: dict[str, Any], family: type, tmp_path: Path) -> None:
    assert find_family(config, tmp_path) is family
