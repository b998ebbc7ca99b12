"""The LLaDA modules against reference logits, and what the rest of the house relies on."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from dare_lightning.families.base import PolicyModel, token_log_probs, using_attention
from dare_lightning.families.llada import LLaDA, LLaDAConfig
from tests.shared import FIXTURES, fixture_model, golden_files, shared_file
from tests.tiny import END_OF_TURN, EOS, MASK, PAD, tiny_config, tiny_llada, tiny_tokenizer

ATOL, RTOL = 2e-4, 1e-4


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("golden", golden_files("models/llada-tiny-*.npz"))
def test_logits_equal_the_reference(golden, attention):
    policy = LLaDA.from_pretrained(str(fixture_model(golden.stem)), attention=attention)
    arrays = np.load(golden)
    for case in sorted({name.split(".")[0] for name in arrays.files}):
        ids = torch.from_numpy(arrays[f"{case}.input_ids"])
        mask = torch.ones_like(ids)
        if f"{case}.attention_mask" in arrays.files:
            mask = torch.from_numpy(arrays[f"{case}.attention_mask"])
        expected = torch.from_numpy(arrays[f"{case}.logits"])[mask.bool()]
        with torch.no_grad():
            logits = policy(ids, mask.bool())[mask.bool()]
        torch.testing.assert_close(logits, expected, atol=ATOL, rtol=RTOL)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("golden", golden_files("models/llada-tiny-*.json"))
def test_tokenizer_equals_the_reference(golden):
    policy = LLaDA.from_pretrained(str(fixture_model(golden.stem)))
    reference = json.loads(golden.read_text())["tokenizer"]
    tokenizer = policy.tokenizer
    assert len(tokenizer) == reference["len"]
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokenizer.special_tokens_map.items()}
    for name, expected in reference["special_ids"].items():
        assert ids.get(name) == expected, name
    for case in reference["texts"]:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"]
        assert tokenizer.decode(case["ids"]) == case["decoded"]
    for case in reference["chats"]:
        rendered = tokenizer.apply_chat_template(
            case["messages"], add_generation_prompt=case["add_generation_prompt"], tokenize=False
        )
        assert rendered == case["rendered"]
        assert tokenizer.encode(rendered, add_special_tokens=False) == case["ids"]


def test_the_published_8b_has_exactly_the_published_tensors():
    folder = shared_file("published/LLaDA-8B-Instruct")
    config = json.loads((folder / "config.json").read_text())
    with torch.device("meta"):
        policy = LLaDA(config, tiny_tokenizer())
    published = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(policy.state_dict()) == set(published["weight_map"])
    assert len(policy.state_dict()) == 291
    assert sum(2 * weight.numel() for weight in policy.parameters()) == published["metadata"]["total_size"]
    assert (policy.mask_token_id, policy.eos_token_id, policy.pad_token_id) == (126336, 126081, 126081)


def test_a_tiny_policy_offers_what_the_house_asks_for():
    policy = tiny_llada()
    assert isinstance(policy, PolicyModel)
    assert (policy.mask_token_id, policy.pad_token_id, policy.eos_token_id) == (MASK, PAD, EOS)
    assert policy.stop_token_ids == (EOS, END_OF_TURN)
    assert policy.block_length is None
    assert policy.logits(policy.denoise(torch.tensor([[7, 4]]), torch.tensor([[7, 8]]))).shape == (1, 2, 40)


def test_random_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = tiny_llada(seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    torch.testing.assert_close(tiny_llada(seed=3).state_dict(), first.state_dict(), rtol=0, atol=0)
    assert not torch.equal(next(tiny_llada(seed=4).parameters()), next(first.parameters()))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_padded_row_gets_what_it_gets_alone(attention, side):
    policy = tiny_llada()
    row, other = torch.tensor([7, PAD, 9, MASK, EOS, 12]), torch.randint(5, 40, (10,))
    own = slice(4, 10) if side == "left" else slice(0, 6)
    ids = torch.stack([torch.full((10,), PAD), other])
    ids[0, own] = row
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[0] = False
    mask[0, own] = True
    with torch.no_grad(), using_attention(policy, attention):
        torch.testing.assert_close(policy(ids, mask)[0, own], policy(row[None])[0], atol=1e-5, rtol=0)
        assert (policy(ids)[0, own] - policy(row[None])[0]).abs().max() > 1e-2


def test_attention_backends_agree_and_an_unknown_one_is_refused():
    policy, ids = tiny_llada(dtype=torch.float64), torch.randint(5, 40, (2, 9))
    plain = policy(ids)
    with using_attention(policy, "eager"):
        torch.testing.assert_close(policy(ids), plain)
    assert policy.attention == "sdpa"
    with pytest.raises(ValueError, match="eager, sdpa"):
        policy.attention = "flash"


def test_gradient_checkpointing_changes_no_gradient():
    ids = torch.randint(5, 40, (2, 9))
    gradients = []
    for flag in (False, True):
        policy = tiny_llada(dtype=torch.float64)
        policy.gradient_checkpointing = flag
        token_log_probs(policy, ids, ids, torch.ones(2, 9).bool(), torch.ones(2, 9).bool()).sum().backward()
        gradients.append({name: weight.grad for name, weight in policy.named_parameters()})
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


def test_gradient_checkpointing_keeps_less_for_the_backward_pass():
    ids = torch.randint(5, 40, (2, 9))
    kept = []
    for flag in (False, True):
        policy = tiny_llada()
        policy.gradient_checkpointing = flag
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, to=sizes: (to.append(x.numel()), x)[1], lambda x: x):
            policy(ids)
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 2


def test_a_forward_pass_in_inference_mode_does_not_spoil_training():
    policy, ids = tiny_llada(), torch.randint(5, 40, (1, 5))
    with torch.inference_mode():
        policy(ids)
    policy(ids).sum().backward()


def test_shared_key_heads_and_tied_weights():
    policy = tiny_llada(
        n_heads=4, n_kv_heads=2, weight_tying=True, mlp_hidden_size=None, mlp_ratio=3, embedding_size=64
    )
    shapes = {name: tuple(value.shape) for name, value in policy.state_dict().items()}
    assert shapes["model.transformer.blocks.0.k_proj.weight"] == (16, 32)
    assert shapes["model.transformer.blocks.0.ff_proj.weight"] == (96, 32)
    assert "model.transformer.ff_out.weight" not in shapes
    assert policy(torch.tensor([[5]])).shape == (1, 1, 64)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("block_type", "sequential", "'llama'"),
        ("activation_type", "swiglu", "'silu'"),
        ("block_group_size", 2, "1"),
        ("layer_norm_type", "default", "'rms'"),
        ("alibi", True, "False"),
        ("rope", False, "True"),
        ("include_bias", True, "False"),
        ("attention_layer_norm", True, "False"),
        ("scale_logits", True, "False"),
        ("residual_dropout", 0.1, "0"),
        ("n_layers", 0, "positive whole number"),
        ("d_model", "32", "positive whole number"),
        ("rms_norm_eps", None, "positive number"),
        ("weight_tying", None, "true or false"),
        ("embedding_size", 30, "vocab_size=40"),
        ("n_kv_heads", 3, "n_heads=2"),
        ("d_model", 33, "n_heads=2"),
    ],
)
def test_an_unsupported_config_value_is_named(key, value, allowed):
    with pytest.raises(ValueError, match=f"{key}={value!r}.*{allowed}|{allowed}.*{key}={value!r}"):
        LLaDAConfig.parse(tiny_config() | {key: value})


@pytest.mark.parametrize("key", ["rope_theta", "weight_tying", "residual_dropout", "mlp_hidden_size", "block_type"])
def test_a_missing_config_key_is_named_not_defaulted(key):
    config = tiny_config()
    del config[key]
    with pytest.raises(ValueError, match=key):
        LLaDAConfig.parse(config)


def test_unknown_config_keys_are_kept():
    assert tiny_llada(flash_attn_varlen=True).config["flash_attn_varlen"] is True


@pytest.mark.parametrize(("key_heads", "multi_query", "expected"), [(None, None, 4), (None, True, 1), (2, None, 2)])
def test_key_heads_follow_the_config(key_heads, multi_query, expected):
    config = tiny_config(heads=4, n_kv_heads=key_heads, multi_query_attention=multi_query)
    assert LLaDAConfig.parse(config).kv_heads == expected


def test_experts_decide_the_family_before_the_model_type():
    assert LLaDA.matches({"model_type": "llada"})
    assert not LLaDA.matches({"model_type": "llada", "num_experts": 8})
    assert not LLaDA.matches({"model_type": "Dream"})
    assert LLaDA.matches({"architectures": ["LLaDAModelLM"]})


def test_every_other_fixture_is_refused_by_name():
    others = [path for path in sorted((FIXTURES / "models").glob("*/config.json")) if "llada-tiny" not in str(path)]
    if not others:
        pytest.skip(f"no fixtures under {FIXTURES}")
    for path in others:
        with pytest.raises(ValueError, match=path.parent.name):
            LLaDA.from_pretrained(str(path.parent))
