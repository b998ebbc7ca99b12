"""LLaDA-MoE against reference logits, the published sizes, and the published layout of its experts."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dare_lightning.families.adapters import LoRA
from dare_lightning.families.checkpoint import save_checkpoint
from dare_lightning.families.experts import recorded_router_logits, split_experts
from dare_lightning.families.llada import LLaDA
from dare_lightning.families.llada_moe import LLaDAMoE, LLaDAMoEConfig
from dare_lightning.families.tiny import character_tokenizer, llada_moe_config, new_tiny_llada_moe
from tests.shared import fixture_model, golden_files

ATOL, RTOL = 2e-4, 1e-4
# LLaDA-MoE-7B-A1B as its paper and model card describe it.
PUBLISHED = llada_moe_config(16, 2048, 16, 64, 8, 157184) | {
    "dense_intermediate_size": 8192,
    "expert_intermediate_size": 1024,
    "eos_token_id": 156892,
    "pad_token_id": 156892,
    "rope_theta": 50000,
}


def tiny_config(**changes: Any) -> dict[str, Any]:
    return llada_moe_config(2, 16, 2, 4, 2, len(character_tokenizer())) | changes


def tiny_policy(**changes: Any) -> LLaDAMoE:
    return LLaDAMoE.from_config(tiny_config(**changes), character_tokenizer(), seed=0)


@pytest.fixture
def folder(tmp_path):
    """A checkpoint with every kind of layer, in one file."""
    options = {"moe_layer_freq": [0, 1], "shared_expert_intermediate_size": 8, "moe_router_enable_expert_bias": True}
    tiny_policy(**options).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("golden", golden_files("models/llada-moe-*.npz"))
def test_logits_and_routing_equal_the_reference(golden, attention):
    policy = LLaDAMoE.from_pretrained(str(fixture_model(golden.stem)), attention=attention)
    arrays = np.load(golden)
    for case in sorted({name.split(".")[0] for name in arrays.files}):
        ids = torch.from_numpy(arrays[f"{case}.input_ids"])
        mask = torch.ones_like(ids)
        if f"{case}.attention_mask" in arrays.files:
            mask = torch.from_numpy(arrays[f"{case}.attention_mask"])
        expected = torch.from_numpy(arrays[f"{case}.logits"])[mask.bool()]
        with torch.no_grad(), recorded_router_logits(policy) as records:
            logits = policy(ids, mask.bool())[mask.bool()]
        torch.testing.assert_close(logits, expected, atol=ATOL, rtol=RTOL)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
        routed = [name for name in arrays.files if name.startswith(f"{case}.router_logits.layer")]
        for name in routed:
            (found,) = records[f"model.layers.{name.rpartition('layer')[2]}.mlp"]
            torch.testing.assert_close(found, torch.from_numpy(arrays[name]), atol=ATOL, rtol=RTOL)
        assert not routed or len(routed) == len(records)


@pytest.mark.parametrize("golden", golden_files("models/llada-moe-*.json"))
def test_the_mask_token_is_the_tokenizers(golden):
    policy = LLaDAMoE.from_pretrained(str(fixture_model(golden.stem)))
    reference = json.loads(golden.read_text())["tokenizer"]
    assert len(policy.tokenizer) == reference["len"]
    assert policy.mask_token_id == reference["special_ids"]["mask_token"]
    turn = policy.tokenizer.convert_tokens_to_ids("<|role_end|>")
    assert policy.stop_token_ids == (policy.config["eos_token_id"], turn)


@pytest.mark.parametrize("golden", golden_files("models/llada-moe-*.npz"))
@pytest.mark.parametrize("limit", [10**9, 30_000], ids=["one_file", "sharded"])
def test_reading_and_writing_keeps_every_bit_of_every_published_tensor(golden, limit, tmp_path):
    source = fixture_model(golden.stem)
    policy = LLaDAMoE.from_pretrained(str(source))
    save_checkpoint(tmp_path, policy.state_dict(), policy.config, policy.tokenizer, policy.source, limit)
    before, after = ({} for _ in range(2))
    for folder, found in ((source, before), (tmp_path, after)):
        for path in folder.glob("*.safetensors"):
            found |= load_file(path)
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_the_published_7b_has_the_published_tensors_and_size():
    with torch.device("meta"):
        policy = LLaDAMoE(PUBLISHED, character_tokenizer())
    shapes = {name: tuple(value.shape) for name, value in split_experts(policy.state_dict()).items()}
    width, inner, rows, norm = 2048, 1024, (157184, 2048), (2048,)
    expected = {"model.embed_tokens.weight": rows, "lm_head.weight": rows, "model.norm.weight": norm}
    for layer in (f"model.layers.{i}" for i in range(16)):
        expected |= {f"{layer}.{name}_layernorm.weight": norm for name in ("input", "post_attention")}
        expected |= {f"{layer}.self_attn.{name}_proj.weight": (width, width) for name in "qkvo"}
        expected |= {f"{layer}.self_attn.{name}_norm.weight": (128,) for name in "qk"}
        expected[f"{layer}.mlp.gate.weight"] = (64, width)
        for expert in (f"{layer}.mlp.experts.{j}" for j in range(64)):
            expected |= {f"{expert}.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
            expected[f"{expert}.down_proj.weight"] = (width, inner)
    assert shapes == expected
    assert sum(weight.numel() for weight in policy.parameters()) == pytest.approx(7.357e9, rel=1e-4)


def test_experts_are_one_tensor_a_projection():
    shapes = {name: tuple(weight.shape) for name, weight in tiny_policy().named_parameters() if ".experts." in name}
    assert shapes["model.layers.0.mlp.experts.up_proj"] == (4, 16, 16)
    assert len(shapes) == 2 * 3


def test_missing_and_surplus_experts_are_named(folder):
    state = load_file(folder / "model.safetensors")
    state["model.layers.1.mlp.experts.4.up_proj.weight"] = state.pop("model.layers.1.mlp.experts.2.up_proj.weight")
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ValueError, match="do not fit") as error:
        LLaDAMoE.from_pretrained(str(folder))
    assert "1 missing: model.layers.1.mlp.experts.2.up_proj.weight" in str(error.value)
    assert "1 unexpected: model.layers.1.mlp.experts.4.up_proj.weight" in str(error.value)


def test_experts_of_two_dtypes_need_one_to_be_chosen(folder):
    state = load_file(folder / "model.safetensors")
    odd = "model.layers.1.mlp.experts.2.up_proj.weight"
    save_file(state | {odd: state[odd].bfloat16()}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"experts\.2\.up_proj.*bfloat16.*dtype"):
        LLaDAMoE.from_pretrained(str(folder))
    assert LLaDAMoE.from_pretrained(str(folder), dtype="float32").arch.experts == 4


def test_adapters_go_to_the_attention_and_experts_cannot_be_targets():
    policy = tiny_policy()
    with pytest.raises(ValueError, match="up_proj match no linear layer of LLaDAMoE.*called gate, k_proj"):
        LoRA(rank=2, alpha=4.0, targets=["q_proj", "up_proj"]).apply(policy)
    report = LoRA(rank=2, alpha=4.0).apply(policy)
    assert {name.rpartition(".")[2] for name in report.layers} == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_weights_are_normalised_only_where_asked_and_configured(folder):
    ids = torch.tensor([[9, 10, 11]])
    for said, changes_anything in ((None, False), (False, False), (True, True)):
        config = tiny_config(norm_topk_prob=said)
        published, configured = (
            LLaDAMoE(config, character_tokenizer(), norm_topk_prob=option) for option in ("published", "config")
        )
        for policy in (published, configured):
            policy.load_state_dict(tiny_policy().state_dict())
        assert torch.equal(published(ids), tiny_policy()(ids))
        assert torch.equal(configured(ids), published(ids)) is not changes_anything
    with pytest.raises(ValueError, match="norm_topk_prob='always'.*published.*config"):
        LLaDAMoE.from_pretrained(str(folder), norm_topk_prob="always")


def test_a_smaller_rotary_part_and_a_clip_change_the_computation():
    ids, plain = torch.tensor([[9, 10, 11]]), tiny_policy()
    for change in ({"partial_rotary_factor": 0.5}, {"clip_qkv": 0.1}, {"qk_layernorm": False}):
        other = tiny_policy(**change)
        other.load_state_dict(plain.state_dict(), strict=False)
        assert (other(ids) - plain(ids)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_layer_freq": [1]}, r"moe_layer_freq=\[1\].*num_hidden_layers=2"),
        ({"moe_layer_freq": 1}, "moe_layer_freq=1.*num_hidden_layers=2"),
        ({"moe_layer_freq": [0, 2]}, r"moe_layer_freq=\[0, 2\]"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok=5.*num_experts=4"),
        ({"num_experts": 0}, "num_experts=0.*positive whole number"),
        ({"attention_bias": True}, "attention_bias=True.*False"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling=.*None"),
        ({"partial_rotary_factor": 1.5}, r"partial_rotary_factor=1\.5.*heads of size 8"),
        ({"qk_layernorm": None}, "qk_layernorm=None.*true or false"),
        ({"shared_expert_intermediate_size": -1}, "shared_expert_intermediate_size=-1.*positive whole number"),
    ],
    ids=str,
)
def test_an_unsupported_config_value_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        LLaDAMoEConfig.parse(tiny_config(**changes))


def test_missing_config_keys_are_named():
    config = tiny_config(moe_layer_freq=[0, 1])
    del config["dense_intermediate_size"]
    with pytest.raises(ValueError, match="LLaDA-MoE model lacks dense_intermediate_size"):
        LLaDAMoEConfig.parse(config)
    del config["num_experts"], config["qk_layernorm"]
    with pytest.raises(ValueError, match="LLaDA-MoE model lacks num_experts, qk_layernorm"):
        LLaDAMoEConfig.parse(config)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llada", "num_experts": 8},
        {"model_type": "lladamoe", "num_experts": 8},
        {"model_type": "llada", "architectures": ["LLaDAMoEModel"]},
        {"architectures": ["LLaDAMoEModelLM"], "num_experts": 8},
        {"model_type": "Dream", "num_experts": 8, "expert_intermediate_size": 64},
        {"model_type": None, "num_experts": 8, "expert_intermediate_size": 64},
    ],
    ids=str,
)
def test_experts_or_the_architecture_decide_before_the_model_type(config):
    assert LLaDAMoE.matches(config)
    assert not LLaDA.matches(config)


def test_other_families_with_experts_are_not_taken():
    assert not LLaDAMoE.matches({"model_type": "llada"})
    assert not LLaDAMoE.matches({"model_type": "qwen3_moe", "num_experts": 8})


def test_gradients_reach_the_experts_that_were_chosen():
    policy = new_tiny_llada_moe(layers=1, width=16, heads=2, experts=8, top_k=1)
    with recorded_router_logits(policy) as records:
        policy(torch.tensor([[9, 10]])).logsumexp(-1).sum().backward()
    chosen = set(records["model.layers.0.mlp"][0].argmax(-1).tolist())
    gradient = policy.model.layers[0].mlp.experts.up_proj.grad
    assert {j for j in range(8) if gradient[j].abs().max() > 0} == chosen
