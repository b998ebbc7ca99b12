"""LLaDA2.0 and LLaDA2.1: block diffusion over a Ling-style mixture of experts (mini 16B-A1B, flash 100B).

Nothing in a checkpoint says which of the two it is; they differ in how they are decoded. Module names equal the
published state-dict keys, but for the experts, whose weights are stacked (`experts.py`).

Source: Bie et al. 2025, arXiv:2512.15745 (2.0), and 2026, arXiv:2602.08676 (2.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dare_lightning.families import config as keys
from dare_lightning.families import layers
from dare_lightning.families.attention import Context, Rotary, View, attend, run_stack
from dare_lightning.families.decoder import AttentionShape, GatedMLP
from dare_lightning.families.experts import Experts, GroupLimitedGate, SharedMixture
from dare_lightning.families.load import read_policy
from dare_lightning.families.policy import BlockPolicy

BLOCK_LENGTH = 32
"""Of the published models, whose config.json does not say it."""

_MERGED = "llada2_moe_veomni"
"""The name of checkpoints whose experts are stacked in the file; they are saved one by one, under the usual name."""

# What this computation is written for; other keys of the config do not change it upstream, and are ignored here.
_ALLOWED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0,),
    "rope_scaling": (None,),
    "use_bias": (False,),
    "use_qkv_bias": (False,),
    "use_qk_norm": (True,),
    "use_sliding_window": (False,),
}


@dataclass(frozen=True)
class LLaDA2Config:
    """The sizes that config.json sets.

    Attributes:
        layers, dense_layers: num_hidden_layers, and how many of the first have no experts.
        dense_width, expert_width, shared_width: inner sizes of the MLP of a layer without experts, of an expert, and
            of the expert that every token reads (0 where there is none).
        experts, groups, kept_groups, top_k, scale: see `GroupLimitedGate`.
        rows: vocab_size, the rows of the embedding and the output head.
        tied: the head is the embedding.
        eps: of all RMS norms.
        rotary: dimensions of a head that are turned, and the base of the angles.
        attention: of every layer.
    """

    layers: int
    dense_layers: int
    dense_width: int
    expert_width: int
    shared_width: int
    experts: int
    groups: int
    kept_groups: int
    top_k: int
    scale: float
    rows: int
    tied: bool
    eps: float
    rotary: Rotary
    attention: AttentionShape

    @classmethod
    def parse(cls, config: dict[str, Any]) -> LLaDA2Config:
        """Read a config.json; keys that do not change the computation are ignored.

        Raises:
            ValueError: a key is missing, or has a value that this family does not compute.
        """
        shape = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        sizes = ("num_hidden_layers", "intermediate_size", "moe_intermediate_size", "vocab_size")
        routing = ("num_experts", "n_group", "topk_group", "num_experts_per_tok")
        others = ("first_k_dense_replace", "num_shared_experts", "routed_scaling_factor", "rms_norm_eps", "rope_theta")
        keys.require_keys(config, (*shape, *sizes, *routing, *others, "tie_word_embeddings"), "LLaDA2")
        keys.require_values(config, _ALLOWED_VALUES, "LLaDA2")
        width, heads, kv_heads, head_dim = (keys.whole(config, key) for key in shape)
        depth, dense_width, expert_width, rows = (keys.whole(config, key) for key in sizes)
        experts, groups, kept_groups, top_k = (keys.whole(config, key) for key in routing)
        eps = keys.number(config, "rms_norm_eps")
        rotary = Rotary(keys.rotary_dim(config, head_dim), keys.number(config, "rope_theta"))
        return cls(
            layers=depth,
            dense_layers=keys.count(config, "first_k_dense_replace"),
            dense_width=dense_width,
            expert_width=expert_width,
            shared_width=expert_width * keys.count(config, "num_shared_experts"),
            experts=experts,
            groups=groups,
            kept_groups=kept_groups,
            top_k=top_k,
            scale=keys.number(config, "routed_scaling_factor"),
            rows=rows,
            tied=keys.switch(config, "tie_word_embeddings"),
            eps=eps,
            rotary=rotary,
            attention=AttentionShape(width, heads, kv_heads, head_dim, norm_eps=eps),
        )


class FusedAttention(nn.Module):
    """Attention with one projection for queries, keys and values: all query heads, then key heads, then value heads."""

    def __init__(self, shape: AttentionShape, eps: float) -> None:
        super().__init__()
        self.sizes = [shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.kv_heads * shape.head_dim]
        self.head_dim = shape.head_dim
        self.query_key_value = nn.Linear(shape.width, sum(self.sizes), bias=False)
        self.query_layernorm = layers.RMSNorm(shape.head_dim, eps)
        self.key_layernorm = layers.RMSNorm(shape.head_dim, eps)
        self.dense = nn.Linear(self.sizes[0], shape.width, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        parts = self.query_key_value(x).split(self.sizes, -1)
        q, k, v = (layers.split_heads(part, self.head_dim) for part in parts)
        return self.dense(attend(self.query_layernorm(q), self.key_layernorm(k), v, context))


class Layer(nn.Module):
    """One pre-norm layer."""

    def __init__(self, arch: LLaDA2Config, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = layers.RMSNorm(arch.attention.width, arch.eps)
        self.attention = FusedAttention(arch.attention, arch.eps)
        self.post_attention_layernorm = layers.RMSNorm(arch.attention.width, arch.eps)
        self.mlp = mlp

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = x + self.attention(self.input_layernorm(x), context)
        return x + self.mlp(self.post_attention_layernorm(x))


class Stack(nn.Module):
    """The tensors under `model`."""

    def __init__(self, arch: LLaDA2Config) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(arch.rows, arch.attention.width)
        self.layers = nn.ModuleList([Layer(arch, _mlp(arch, i)) for i in range(arch.layers)])
        self.norm = layers.RMSNorm(arch.attention.width, arch.eps)
        self.rotary = arch.rotary

    def forward(
        self,
        ids: Tensor,
        attention_mask: Tensor | None,
        view: View | None,
        attention: str,
        gradient_checkpointing: bool,
    ) -> Tensor:
        """Final hidden states [B, L, H] of ids [B, L], as `decoder.Decoder.forward`."""
        return run_stack(
            ids,
            attention_mask,
            view,
            embed=self.word_embeddings,
            layers=self.layers,
            norm=self.norm,
            rotary=self.rotary,
            attention=attention,
            checkpointing=gradient_checkpointing,
        )


class LLaDA2(BlockPolicy):
    """A `PolicyModel` of LLaDA2.0 and LLaDA2.1. Logits at position i predict token i.

    Args:
        config: the content of config.json; written back on save, under the usual model_type.
        tokenizer: the checkpoint's tokenizer, which declares the mask and end tokens: the config has no ids for them.
        attention: kernel name ("eager", "sdpa", "flex", "varlen"); may be set again at any time.
        gradient_checkpointing: keep only each layer's input for the backward pass.
        block_length: tokens a block, where config.json does not say (`block_size`); None for the published length.
        mask_token_id: where neither config.json nor the tokenizer says.

    Raises:
        ValueError: the config is not one that this family computes, there is no mask token, or two block lengths that
            contradict.
    """

    residual = ("dense", "down_proj")

    def __init__(
        self,
        config: dict[str, Any],
        tokenizer: Any,
        attention: str = "sdpa",
        gradient_checkpointing: bool = False,
        block_length: int | None = None,
        mask_token_id: int | None = None,
    ) -> None:
        arch = LLaDA2Config.parse(config)
        usual = config | {"model_type": "llada2_moe"} if config.get("model_type") == _MERGED else config
        settings = (attention, gradient_checkpointing, block_length, mask_token_id)
        super().__init__(usual, tokenizer, arch.rows, *settings, published_length=BLOCK_LENGTH)
        self.arch = arch
        self.model = Stack(arch)
        self.lm_head = None if arch.tied else nn.Linear(arch.attention.width, arch.rows, bias=False)
        dense = arch.dense_layers > 0 or arch.shared_width > 0
        mlp = ("gate_proj", "up_proj", "down_proj") if dense else ()
        self.lora_targets: tuple[str, ...] = ("query_key_value", "dense", *mlp)

    @staticmethod
    def matches(config: dict[str, Any]) -> bool:
        """Whether this config.json is a LLaDA2.0 or LLaDA2.1 model."""
        if config.get("model_type") is not None:
            return config["model_type"] in ("llada2_moe", "llada21_moe", _MERGED)
        return config.get("architectures") == ["LLaDA2MoeModelLM"]

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        dtype: str | None = None,
        attention: str = "sdpa",
        gradient_checkpointing: bool = False,
        block_length: int | None = None,
        mask_token_id: int | None = None,
    ) -> LLaDA2:
        """Read a checkpoint in the published layout, or with merged experts; see `read_policy`, the constructor."""
        options = {"attention": attention, "gradient_checkpointing": gradient_checkpointing}
        return read_policy(cls, path, dtype, block_length=block_length, mask_token_id=mask_token_id, **options)

    @property
    def head(self) -> nn.Module:
        """See `Policy.head`."""
        return self.model.word_embeddings if self.lm_head is None else self.lm_head


def _mlp(arch: LLaDA2Config, layer: int) -> nn.Module:
    width = arch.attention.width
    if layer < arch.dense_layers:
        return GatedMLP(width, arch.dense_width)
    gate = GroupLimitedGate(width, arch.experts, arch.groups, arch.kept_groups, arch.top_k, arch.scale)
    shared = GatedMLP(width, arch.shared_width) if arch.shared_width else None
    return SharedMixture(gate, Experts(arch.experts, width, arch.expert_width), shared)
