"""Dream against reference logits and the published checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dare_lightning.families.dream import Dream, dense_config
from dare_lightning.families.tiny import ALPHABET, SPECIAL_TOKENS, dream_config, new_tiny_dream
from dare_lightning.families.tokenizer import load_tokenizer
from tests.shared import fixture_model, golden_files, shared_file

ATOL, RTOL = 2e-4, 1e-4
VOCABULARY = len(SPECIAL_TOKENS) + len(ALPHABET)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("golden", golden_files("models/dream-*.npz"))
def test_logits_equal_the_reference_one_token_later(golden, attention):
    policy = Dream.from_pretrained(str(fixture_model(golden.stem)), attention=attention)
    arrays = np.load(golden)
    for case in sorted({name.split(".")[0] for name in arrays.files}):
        ids, raw = torch.from_numpy(arrays[f"{case}.input_ids"]), torch.from_numpy(arrays[f"{case}.logits"])
        mask = torch.ones_like(ids)
        if f"{case}.attention_mask" in arrays.files:
            mask = torch.from_numpy(arrays[f"{case}.attention_mask"])
        with torch.no_grad():
            logits = policy(ids, mask.bool())
        for row, exists in enumerate(mask.bool()):
            columns = exists.nonzero().flatten()
            expected = raw[row, torch.cat([columns[:1], columns[:-1]])]
            torch.testing.assert_close(logits[row, columns], expected, atol=ATOL, rtol=RTOL)
            assert torch.equal(logits[row, columns].argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("golden", golden_files("models/dream-*.json"))
def test_special_tokens_equal_the_reference(golden):
    policy = Dream.from_pretrained(str(fixture_model(golden.stem)))
    reference = json.loads(golden.read_text())["tokenizer"]
    assert len(policy.tokenizer) == reference["len"]
    for name, token in policy.tokenizer.special_tokens_map.items():
        if name in reference["special_ids"]:
            assert policy.tokenizer.convert_tokens_to_ids(token) == reference["special_ids"][name], name
    assert policy.mask_token_id == policy.config["mask_token_id"]
    turn = policy.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert policy.stop_token_ids == (policy.config["eos_token_id"], turn)


def published() -> Path:
    return shared_file("published/Dream-v0-Instruct-7B")


def test_the_published_7b_has_exactly_the_published_tensors():
    config = json.loads((published() / "config.json").read_text())
    with torch.device("meta"):
        policy = Dream(config, load_tokenizer(published()))
    index = json.loads((published() / "model.safetensors.index.json").read_text())
    shapes = {name: tuple(value.shape) for name, value in policy.state_dict().items()}
    assert set(shapes) == set(index["weight_map"])
    assert sum(2 * weight.numel() for weight in policy.parameters()) == index["metadata"]["total_size"]
    layer = {name.removeprefix("model.layers.3."): shape for name, shape in shapes.items() if ".layers.3." in name}
    assert layer == {
        "input_layernorm.weight": (3584,),
        "post_attention_layernorm.weight": (3584,),
        "self_attn.q_proj.weight": (3584, 3584),
        "self_attn.q_proj.bias": (3584,),
        "self_attn.k_proj.weight": (512, 3584),
        "self_attn.k_proj.bias": (512,),
        "self_attn.v_proj.weight": (512, 3584),
        "self_attn.v_proj.bias": (512,),
        "self_attn.o_proj.weight": (3584, 3584),
        "mlp.gate_proj.weight": (18944, 3584),
        "mlp.up_proj.weight": (18944, 3584),
        "mlp.down_proj.weight": (3584, 18944),
    }
    outside = {name: shape for name, shape in shapes.items() if ".layers." not in name}
    rows = (152064, 3584)
    assert outside == {"model.embed_tokens.weight": rows, "model.norm.weight": (3584,), "lm_head.weight": rows}
    assert (policy.mask_token_id, policy.pad_token_id, policy.stop_token_ids) == (151666, 151643, (151643, 151645))


def test_the_published_tokenizer_needs_no_code_of_its_own():
    tokenizer = load_tokenizer(published())
    assert len(tokenizer) == 151667
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|beginoftext|>", "<|mask|>"]
    assert tokenizer.convert_tokens_to_ids(names) == [151643, 151644, 151645, 151665, 151666]
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert turn.startswith("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n")
    assert turn.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(tokenizer.encode(turn, add_special_tokens=False)) == turn


def test_a_saved_copy_keeps_every_file_of_the_published_layout(tmp_path):
    source = fixture_model("dream-tiny-b")
    Dream.from_pretrained(str(source)).save_pretrained(tmp_path)
    kept = {path.name for path in source.iterdir() if ".safetensors" not in path.name}
    assert kept <= {path.name for path in tmp_path.iterdir()}
    for name in kept - {"config.json"}:
        assert (tmp_path / name).read_bytes() == (source / name).read_bytes(), name
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads((source / "config.json").read_text())


def test_a_token_is_predicted_from_the_state_before_it():
    policy = new_tiny_dream(layers=1, width=16, heads=2).double()
    ids = torch.tensor([[8, 9, 10, 11]])
    raw = policy.model(ids, None, None, "eager", False)
    hidden = policy.hidden_states(ids)
    torch.testing.assert_close(hidden[0, 1:], raw[0, :-1])
    torch.testing.assert_close(hidden[0, 0], raw[0, 0])


def test_the_padding_row_of_the_embedding_is_trained_too():
    policy = new_tiny_dream(layers=1, width=16, heads=2)
    policy(torch.tensor([[policy.pad_token_id, 9]])).logsumexp(-1).sum().backward()
    assert policy.model.embed_tokens.weight.grad[policy.pad_token_id].abs().max() > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_sliding_window": True}, "use_sliding_window=True.*False"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling=.*None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'.*'silu'"),
        ({"attention_dropout": 0.1}, r"attention_dropout=0\.1.*0"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4.*num_key_value_heads=3"),
        ({"hidden_size": 60}, "hidden_size=60.*num_attention_heads=4"),
        ({"vocab_size": "many"}, "vocab_size='many'.*positive whole number"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings=None.*true or false"),
        ({"vocab_size": 3}, r"special tokens \[3, 4\]"),
    ],
    ids=str,
)
def test_an_unsupported_config_value_is_named(changes, message):
    tokenizer = new_tiny_dream(layers=1, width=16, heads=2).tokenizer
    with pytest.raises(ValueError, match=message), torch.device("meta"):
        Dream(dream_config(2, 32, 4, VOCABULARY) | changes, tokenizer)


def test_missing_config_keys_are_named_and_absent_switches_mean_the_published_model():
    config = dream_config(2, 32, 4, VOCABULARY)
    for key in ("use_mrope", "use_sliding_window", "sliding_window", "hidden_act", "rope_scaling"):
        del config[key]
    assert dense_config(config).layers == 2
    del config["rope_theta"], config["hidden_size"]
    with pytest.raises(ValueError, match="Dream model lacks hidden_size, rope_theta"):
        dense_config(config)


def test_the_config_decides_the_family():
    assert Dream.matches({"model_type": "Dream"})
    assert Dream.matches({"model_type": "dream"})
    assert Dream.matches({"architectures": ["DreamModel"]})
    assert not Dream.matches({"model_type": "Dream", "num_experts": 4})
    assert not Dream.matches({"model_type": "llada"})
