"""LLaDA-MoE: a bidirectional denoiser with sparse experts in OLMoE's manner (7B-A1B Base, Instruct).

Source: Zhu et al. 2025, arXiv:2509.24389. Module names equal the published state-dict keys, but for the experts,
whose weights are stacked (`experts.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from dare_lightning.families import config as keys
from dare_lightning.families import decoder
from dare_lightning.families.experts import MixtureOfExperts
from dare_lightning.families.load import read_policy
from dare_lightning.families.policy import MaskedPolicy

NormTopK = Literal["published", "config"]

# What this computation is written for. `moe_router_score_function`, `routed_scaling_factor`, `router_num_group` and
# `router_topk_group` are in the config and not in the published computation, so any value of them is accepted.
_ALLOWED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "attention_dropout": (0,),
    "rope_scaling": (None,),
}


@dataclass(frozen=True)
class LLaDAMoEConfig:
    """The sizes that config.json sets.

    Attributes:
        sparse: for each layer, whether its MLP is a mixture of experts.
        experts, top_k: num_experts, num_experts_per_tok.
        expert_width, dense_width, shared_width: inner sizes of an expert, of the MLP of a layer without experts, and
            of the expert that every token reads; None where there is none.
        expert_bias: whether routers have a bias.
        config_norm_topk: the config's norm_topk_prob, which the published code does not read.
        rows: vocab_size, the rows of the embedding and the output head.
        tied: the head is the embedding.
        eps: of the RMS norms.
        rotary_dim, theta: dimensions of a head that are turned, and the base of the angles.
        attention: of every layer.
    """

    sparse: tuple[bool, ...]
    experts: int
    top_k: int
    expert_width: int
    dense_width: int | None
    shared_width: int | None
    expert_bias: bool
    config_norm_topk: bool
    rows: int
    tied: bool
    eps: float
    rotary_dim: int
    theta: float
    attention: decoder.AttentionShape

    @classmethod
    def parse(cls, config: dict[str, Any]) -> LLaDAMoEConfig:
        """Read a config.json; keys that do not change the computation are ignored.

        Raises:
            ValueError: a key is missing, or has a value that this family does not compute.
        """
        sizes = ("hidden_size", "num_attention_heads", "num_experts", "num_experts_per_tok", "expert_intermediate_size")
        others = ("num_hidden_layers", "num_key_value_heads", "moe_layer_freq", "qk_layernorm", "vocab_size")
        numbers = ("tie_word_embeddings", "rms_norm_eps", "rope_theta")
        keys.require_keys(config, (*sizes, *others, *numbers), "LLaDA-MoE")
        keys.require_values(config, _ALLOWED_VALUES, "LLaDA-MoE")
        width, heads, experts, top_k, expert_width = (keys.whole(config, key) for key in sizes)
        if top_k > experts:
            raise ValueError(f"config.json says num_experts_per_tok={top_k}, more than num_experts={experts}")
        sparse = _sparse_layers(config)
        if not all(sparse):
            keys.require_keys(config, ["dense_intermediate_size"], "LLaDA-MoE")
        eps = keys.number(config, "rms_norm_eps")
        head_dim = keys.head_dim(width, heads)
        kv_heads = heads if config["num_key_value_heads"] is None else keys.whole(config, "num_key_value_heads")
        norm_eps = eps if keys.switch(config, "qk_layernorm") else None
        clip = keys.optional(config, "clip_qkv", keys.number)
        return cls(
            sparse=sparse,
            experts=experts,
            top_k=top_k,
            expert_width=expert_width,
            dense_width=None if all(sparse) else keys.whole(config, "dense_intermediate_size"),
            shared_width=keys.optional(config, "shared_expert_intermediate_size", keys.whole),
            expert_bias=bool(keys.optional(config, "moe_router_enable_expert_bias", keys.switch)),
            config_norm_topk=bool(keys.optional(config, "norm_topk_prob", keys.switch)),
            rows=keys.whole(config, "vocab_size"),
            tied=keys.switch(config, "tie_word_embeddings"),
            eps=eps,
            rotary_dim=keys.rotary_dim(config, head_dim),
            theta=keys.number(config, "rope_theta"),
            attention=decoder.AttentionShape(width, heads, kv_heads, head_dim, norm_eps=norm_eps, clip=clip),
        )


class LLaDAMoE(MaskedPolicy):
    """A `PolicyModel` of the LLaDA-MoE family. Logits at position i predict token i.

    Upstream marks the embedding row of the padding token, which is also the end of text, as one that receives no
    gradient. Here it is trained like the others.

    Args:
        config: the content of config.json; kept unchanged, and written back on save.
        tokenizer: the checkpoint's tokenizer, which declares the mask token: the config has no id for it.
        attention: kernel name ("eager", "sdpa", "flex", "varlen"); may be set again at any time.
        gradient_checkpointing: keep only each layer's input for the backward pass.
        norm_topk_prob: "published" never divides the chosen experts' weights by their sum, as the published code,
            which does not read the config's key of this name; "config" does what the key says.

    Raises:
        ValueError: the config is not one that this family computes, or there is no mask token.
    """

    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")

    def __init__(
        self,
        config: dict[str, Any],
        tokenizer: Any,
        attention: str = "sdpa",
        gradient_checkpointing: bool = False,
        norm_topk_prob: NormTopK = "published",
    ) -> None:
        if norm_topk_prob not in ("published", "config"):
            raise ValueError(f"norm_topk_prob={norm_topk_prob!r}; choose published (never normalised) or config")
        arch = LLaDAMoEConfig.parse(config)
        super().__init__(config, tokenizer, arch.rows, attention, gradient_checkpointing)
        self.arch = arch
        normalize = norm_topk_prob == "config" and arch.config_norm_topk
        stack = [_layer(arch, sparse, normalize) for sparse in arch.sparse]
        self.model = decoder.Decoder(arch.rows, stack, arch.eps, arch.rotary_dim, arch.theta)
        self.lm_head = decoder.output_head(self.model, arch.tied)

    @staticmethod
    def matches(config: dict[str, Any]) -> bool:
        """Whether this config.json is a LLaDA-MoE: its experts say so, whatever model_type it carries.

        `expert_intermediate_size` is a key of this family alone; other families with experts have names of their own.
        """
        if "LLaDAMoE" in str(config.get("architectures")):
            return True
        named = config.get("model_type") in ("llada", "lladamoe") or "expert_intermediate_size" in config
        return bool(config.get("num_experts")) and named

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        dtype: str | None = None,
        attention: str = "sdpa",
        gradient_checkpointing: bool = False,
        norm_topk_prob: NormTopK = "published",
    ) -> LLaDAMoE:
        """Read a checkpoint in the published layout; see `read_policy` and the constructor."""
        options = {"attention": attention, "gradient_checkpointing": gradient_checkpointing}
        return read_policy(cls, path, dtype, norm_topk_prob=norm_topk_prob, **options)


def _layer(arch: LLaDAMoEConfig, sparse: bool, normalize: bool) -> decoder.Layer:
    width = arch.attention.width
    mlp: nn.Module
    if sparse:
        mlp = MixtureOfExperts(width, arch.expert_width, arch.experts, arch.top_k, arch.expert_bias, normalize)
    else:
        assert arch.dense_width is not None  # `parse` requires it
        mlp = decoder.GatedMLP(width, arch.dense_width)
    shared = decoder.GatedMLP(width, arch.shared_width) if sparse and arch.shared_width is not None else None
    return decoder.Layer(arch.eps, arch.attention, mlp, shared)


def _sparse_layers(config: dict[str, Any]) -> tuple[bool, ...]:
    flags, depth = config["moe_layer_freq"], keys.whole(config, "num_hidden_layers")
    if not isinstance(flags, list) or len(flags) != depth or any(flag not in (0, 1) for flag in flags):
        raise ValueError(
            f"config.json says moe_layer_freq={flags!r}; it must have a 0 or a 1 for each of num_hidden_layers={depth}"
        )
    return tuple(bool(flag) for flag in flags)
