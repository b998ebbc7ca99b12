"""Small policies in a published layout, made from scratch: for the tasks inside the package, and to try things out."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from dare_lightning.families.dream import Dream
from dare_lightning.families.llada import LLaDA
from dare_lightning.families.llada2 import LLaDA2
from dare_lightning.families.llada_moe import LLaDAMoE
from dare_lightning.families.sdar import SDAR
from dare_lightning.families.sdar_moe import SDARMoE

PAD, BOS, EOS, END_OF_TURN, MASK, USER, ASSISTANT = range(7)
SPECIAL_TOKENS = (
    "<|pad|>",
    "<|startoftext|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|mdm_mask|>",
    "<|user|>",
    "<|assistant|>",
)
ALPHABET = string.digits + " \n" + string.punctuation + string.ascii_letters
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' ~ message['role'] ~ '|>' ~ message['content'] ~ '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def character_tokenizer(
    special: Sequence[str] = SPECIAL_TOKENS, alphabet: Sequence[str] = ALPHABET, chat_template: str = CHAT_TEMPLATE
) -> Any:
    """One token for each entry of `special`, then of `alphabet`; unknown characters read as `?`.

    `special` begins with the pad, begin, end-of-text, end-of-turn and mask tokens.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    table = {name: number for number, name in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(table, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=special[PAD],
        bos_token=special[BOS],
        eos_token=special[EOS],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def llada_config(layers: int, width: int, heads: int, vocabulary: int) -> dict[str, Any]:
    """A complete config.json of a LLaDA model of this size; the inner width of its MLP is twice `width`."""
    off = ("alibi", "bias_for_layer_norm", "include_bias", "include_qkv_bias", "input_emb_norm", "scale_logits")
    return dict.fromkeys((*off, "attention_layer_norm", "weight_tying", "use_cache"), False) | {
        "activation_type": "silu",
        "architectures": ["LLaDAModelLM"],
        "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_llada.LLaDAConfig",
            "AutoModel": "modeling_llada.LLaDAModelLM",
            "AutoModelForCausalLM": "modeling_llada.LLaDAModelLM",
        },
        "block_group_size": 1,
        "block_type": "llama",
        "d_model": width,
        "embedding_dropout": 0.0,
        "embedding_size": vocabulary,
        "eos_token_id": EOS,
        "layer_norm_type": "rms",
        "mask_token_id": MASK,
        "max_sequence_length": 512,
        "mlp_hidden_size": 2 * width,
        "mlp_ratio": 2,
        "model_type": "llada",
        "n_heads": heads,
        "n_kv_heads": heads,
        "n_layers": layers,
        "pad_token_id": PAD,
        "residual_dropout": 0.0,
        "rms_norm_eps": 1e-5,
        "rope": True,
        "rope_full_precision": True,
        # Sequences are a few dozen tokens long; a large base would leave most angles unused.
        "rope_theta": 100.0,
        "torch_dtype": "float32",
        "vocab_size": vocabulary,
    }


def dream_config(layers: int, width: int, heads: int, vocabulary: int) -> dict[str, Any]:
    """A complete config.json of a Dream model of this size; two query heads share a key head where they can."""
    return _qwen_style(layers, width, heads, vocabulary) | {
        "architectures": ["DreamModel"],
        "auto_map": {"AutoConfig": "configuration_dream.DreamConfig", "AutoModel": "modeling_dream.DreamModel"},
        "bos_token_id": BOS,
        "intermediate_size": 2 * width,
        "mask_token_id": MASK,
        "max_window_layers": layers,
        "model_type": "Dream",
        "num_key_value_heads": heads // 2 if heads % 2 == 0 else heads,
        "rms_norm_eps": 1e-6,
        "sliding_window": None,
        "use_mrope": False,
        "use_sliding_window": False,
    }


def llada_moe_config(layers: int, width: int, heads: int, experts: int, top_k: int, vocabulary: int) -> dict[str, Any]:
    """A complete config.json of a LLaDA-MoE model of this size; each expert's inner width is `width`."""
    return _qwen_style(layers, width, heads, vocabulary) | {
        "architectures": ["LLaDAMoEModelLM"],
        "attention_bias": False,
        "auto_map": {
            "AutoConfig": "configuration_lladamoe.LLaDAConfig",
            "AutoModel": "modeling_lladamoe.LLaDAMoEModelLM",
            "AutoModelForCausalLM": "modeling_lladamoe.LLaDAMoEModelLM",
        },
        "clip_qkv": None,
        "dense_intermediate_size": 2 * width,
        "expert_intermediate_size": width,
        "model_type": "llada",
        "moe_layer_freq": [1] * layers,
        "moe_router_enable_expert_bias": False,
        "moe_router_score_function": "softmax",
        "norm_topk_prob": None,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "num_key_value_heads": heads,
        "partial_rotary_factor": 1,
        "qk_layernorm": True,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1,
        "router_aux_loss_coef": 0.01,
        "shared_expert_intermediate_size": None,
    }


def sdar_config(layers: int, width: int, heads: int, block_length: int, vocabulary: int) -> dict[str, Any]:
    """A complete config.json of an SDAR model of this size; two query heads share a key head where they can."""
    return _qwen_style(layers, width, heads, vocabulary) | {
        "architectures": ["SDARForCausalLM"],
        "attention_bias": False,
        "auto_map": {
            "AutoConfig": "configuration_sdar.SDARConfig",
            "AutoModel": "modeling_sdar.SDARModel",
            "AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM",
        },
        "block_size": block_length,
        "bos_token_id": BOS,
        "head_dim": width // heads,
        "intermediate_size": 2 * width,
        "mask_token_id": MASK,
        "model_type": "sdar",
        "num_key_value_heads": heads // 2 if heads % 2 == 0 else heads,
        "rms_norm_eps": 1e-6,
        "sliding_window": None,
        "use_sliding_window": False,
    }


def sdar_moe_config(
    layers: int, width: int, heads: int, experts: int, top_k: int, block_length: int, vocabulary: int
) -> dict[str, Any]:
    """A complete config.json of an SDAR-MoE model of this size; each expert's inner width is `width`."""
    return sdar_config(layers, width, heads, block_length, vocabulary) | {
        "architectures": ["SDARMoeForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_sdar_moe.SDARMoeConfig",
            "AutoModel": "modeling_sdar_moe.SDARMoeModel",
            "AutoModelForCausalLM": "modeling_sdar_moe.SDARMoeForCausalLM",
        },
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "model_type": "sdar_moe",
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }


def llada2_config(
    layers: int, width: int, heads: int, experts: int, top_k: int, block_length: int, vocabulary: int
) -> dict[str, Any]:
    """A complete config.json of a LLaDA2 model of this size; the first of several layers has no experts."""
    return _qwen_style(layers, width, heads, vocabulary) | {
        "architectures": ["LLaDA2MoeModelLM"],
        "auto_map": {
            "AutoConfig": "configuration_llada2_moe.LLaDA2MoeConfig",
            "AutoModel": "modeling_llada2_moe.LLaDA2MoeModel",
            "AutoModelForCausalLM": "modeling_llada2_moe.LLaDA2MoeModelLM",
        },
        "block_size": block_length,
        "first_k_dense_replace": min(1, layers - 1),
        "head_dim": width // heads,
        "intermediate_size": 2 * width,
        "mask_token_id": MASK,
        "model_type": "llada2_moe",
        "moe_intermediate_size": width // 2,
        "moe_router_enable_expert_bias": True,
        "n_group": 2,
        "norm_topk_prob": True,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "num_key_value_heads": heads // 2 if heads % 2 == 0 else heads,
        "num_shared_experts": 1,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-6,
        "routed_scaling_factor": 2.5,
        "score_function": "sigmoid",
        "topk_group": 1,
        "use_bias": False,
        "use_qk_norm": True,
        "use_qkv_bias": False,
    }


def _qwen_style(layers: int, width: int, heads: int, vocabulary: int) -> dict[str, Any]:
    """The keys that all families but LLaDA share."""
    return {
        "attention_dropout": 0.0,
        "eos_token_id": EOS,
        "hidden_act": "silu",
        "hidden_size": width,
        "initializer_range": 0.02,
        "max_position_embeddings": 512,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "pad_token_id": PAD,
        "rope_scaling": None,
        "rope_theta": 100.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": False,
        "vocab_size": vocabulary,
    }


def new_tiny_llada(layers: int = 3, width: int = 64, heads: int = 4, seed: int = 0) -> LLaDA:
    """A LLaDA policy over characters with random weights that depend on `seed` alone."""
    tokenizer = character_tokenizer()
    return LLaDA.from_config(llada_config(layers, width, heads, len(tokenizer)), tokenizer, seed)


def new_tiny_dream(layers: int = 3, width: int = 64, heads: int = 4, seed: int = 0) -> Dream:
    """A Dream policy over characters with random weights that depend on `seed` alone."""
    tokenizer = character_tokenizer()
    return Dream.from_config(dream_config(layers, width, heads, len(tokenizer)), tokenizer, seed)


def new_tiny_llada_moe(
    layers: int = 3, width: int = 64, heads: int = 4, experts: int = 4, top_k: int = 2, seed: int = 0
) -> LLaDAMoE:
    """A LLaDA-MoE policy over characters with random weights that depend on `seed` alone."""
    tokenizer = character_tokenizer()
    config = llada_moe_config(layers, width, heads, experts, top_k, len(tokenizer))
    return LLaDAMoE.from_config(config, tokenizer, seed)


def new_tiny_sdar(layers: int = 3, width: int = 64, heads: int = 4, block_length: int = 4, seed: int = 0) -> SDAR:
    """An SDAR policy over characters with random weights that depend on `seed` alone."""
    tokenizer = character_tokenizer()
    return SDAR.from_config(sdar_config(layers, width, heads, block_length, len(tokenizer)), tokenizer, seed)


def new_tiny_sdar_moe(
    layers: int = 3,
    width: int = 64,
    heads: int = 4,
    experts: int = 4,
    top_k: int = 2,
    block_length: int = 4,
    seed: int = 0,
) -> SDARMoE:
    """An SDAR-MoE policy over characters with random weights that depend on `seed` alone."""
    tokenizer = character_tokenizer()
    config = sdar_moe_config(layers, width, heads, experts, top_k, block_length, len(tokenizer))
    return SDARMoE.from_config(config, tokenizer, seed)


def new_tiny_llada2(
    layers: int = 3,
    width: int = 64,
    heads: int = 4,
    experts: int = 4,
    top_k: int = 2,
    block_length: int = 4,
    seed: int = 0,
) -> LLaDA2:
    """A LLaDA2 policy over characters with random weights that depend on `seed` alone."""
    tokenizer = character_tokenizer()
    config = llada2_config(layers, width, heads, experts, top_k, block_length, len(tokenizer))
    return LLaDA2.from_config(config, tokenizer, seed)
