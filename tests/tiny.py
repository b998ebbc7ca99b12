"""Tiny real policies that tests build in memory, in milliseconds."""

from __future__ import annotations

import string
from typing import Any

import torch

from dare_lightning.families.llada import LLaDA

PAD, BOS, EOS, END_OF_TURN, MASK = range(5)
SPECIAL_TOKENS = ("<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|eot_id|>", "<|mdm_mask|>")

# The first 35 spell puzzles, sums and the names of the chat roles.
_LETTERS = "0123456789 \n?+-*/()=.:etaoinshrdluc"
ALPHABET = _LETTERS + "".join(c for c in string.printable if c not in _LETTERS and c not in "\r\x0b\x0c")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] ~ ':' ~ message['content'] ~ '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def tiny_tokenizer(vocab: int = 40) -> Any:
    """One token for each character, ids 0 to 4 pad, bos, eos, end of turn, mask; unknown characters read as `?`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ordinary = vocab - len(SPECIAL_TOKENS)
    names = [*ALPHABET[:ordinary], *(f"<|extra_{i}|>" for i in range(ordinary - len(ALPHABET)))]
    table = {name: i for i, name in enumerate([*SPECIAL_TOKENS, *names])}
    tokenizer = Tokenizer(models.WordLevel(table, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL_TOKENS[PAD],
        bos_token=SPECIAL_TOKENS[BOS],
        eos_token=SPECIAL_TOKENS[EOS],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_config(vocab: int = 40, layers: int = 2, width: int = 32, heads: int = 2, **changes: Any) -> dict[str, Any]:
    """A complete config.json of a small LLaDA model, with these changes."""
    config = {
        "activation_type": "silu",
        "alibi": False,
        "architectures": ["LLaDAModelLM"],
        "attention_dropout": 0.0,
        "attention_layer_norm": False,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "d_model": width,
        "embedding_dropout": 0.0,
        "embedding_size": vocab,
        "eos_token_id": EOS,
        "include_bias": False,
        "include_qkv_bias": False,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "mask_token_id": MASK,
        "max_sequence_length": 512,
        "mlp_hidden_size": 2 * width,
        "mlp_ratio": 4,
        "model_type": "llada",
        "n_heads": heads,
        "n_kv_heads": heads,
        "n_layers": layers,
        "pad_token_id": PAD,
        "residual_dropout": 0.0,
        "rms_norm_eps": 1e-5,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": 10000.0,
        "scale_logits": False,
        "torch_dtype": "float32",
        "vocab_size": vocab,
        "weight_tying": False,
    }
    return config | changes


def tiny_llada(
    seed: int = 0,
    vocab: int = 40,
    layers: int = 2,
    width: int = 32,
    heads: int = 2,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> LLaDA:
    """A LLaDA policy with random weights that depend on `seed` alone; `changes` go to its config.json."""
    config = tiny_config(vocab, layers, width, heads, **changes)
    return LLaDA.from_config(config, tiny_tokenizer(vocab), seed).to(dtype)
