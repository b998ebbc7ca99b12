"""SDAR: Qwen3's layout turned into block diffusion (1.7B, 4B, 8B). Module names equal the published state-dict keys.

Source: Cheng et al. 2025, arXiv:2510.06303.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dare_lightning.families import block, decoder, layers
from dare_lightning.families import config as keys
from dare_lightning.families.attention import AttentionName, View
from dare_lightning.families.checkpoint import save_checkpoint
from dare_lightning.families.load import read_policy
from dare_lightning.families.tokenizer import special_ids

# What this computation is written for. The published config class has no defaults that differ.
_ALLOWED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0,),
    "rope_scaling": (None,),
    "use_sliding_window": (False,),
}


@dataclass(frozen=True)
class SDARConfig:
    """The sizes that config.json sets.

    Attributes:
        layers: num_hidden_layers.
        mlp_width: intermediate_size.
        rows: vocab_size, the rows of the embedding and the output head.
        tied: the head is the embedding.
        eps: of all RMS norms.
        theta: base of the rotary angles.
        attention: of every layer.
    """

    layers: int
    mlp_width: int
    rows: int
    tied: bool
    eps: float
    theta: float
    attention: decoder.AttentionShape

    @classmethod
    def parse(cls, config: dict[str, Any], family: str = "SDAR") -> SDARConfig:
        """Read a config.json; keys that do not change the computation are ignored.

        Raises:
            ValueError: a key is missing, or has a value that this family does not compute.
        """
        sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        others = ("head_dim", "vocab_size", "tie_word_embeddings", "rms_norm_eps", "rope_theta")
        keys.require_keys(config, (*sizes, *others), family)
        keys.require_values(config, _ALLOWED_VALUES, family)
        width, mlp_width, depth, heads, kv_heads = (keys.whole(config, key) for key in sizes)
        eps = keys.number(config, "rms_norm_eps")
        return cls(
            layers=depth,
            mlp_width=mlp_width,
            rows=keys.whole(config, "vocab_size"),
            tied=keys.switch(config, "tie_word_embeddings"),
            eps=eps,
            theta=keys.number(config, "rope_theta"),
            # A head's size is a key of its own: heads * head_dim need not be hidden_size.
            attention=decoder.AttentionShape(width, heads, kv_heads, keys.whole(config, "head_dim"), norm_eps=eps),
        )


class SDAR(nn.Module):
    """A `PolicyModel` of the dense SDAR family. Logits at position i predict token i.

    Args:
        config: the content of config.json; kept unchanged, and written back on save.
        tokenizer: the checkpoint's tokenizer.
        attention: kernel name ("eager", "sdpa", "flex", "varlen"); may be set again at any time.
        gradient_checkpointing: keep only each layer's input for the backward pass.
        block_length: tokens a block, where config.json does not say (`block_size`).
        mask_token_id: where neither config.json nor the tokenizer says.

    Raises:
        ValueError: the config is not one that this family computes, there is no mask token, no block length, or two
            that contradict.
    """

    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    left_context: int = 0
    attention = AttentionName()

    def __init__(
        self,
        config: dict[str, Any],
        tokenizer: Any,
        attention: str = "sdpa",
        gradient_checkpointing: bool = False,
        block_length: int | None = None,
        mask_token_id: int | None = None,
    ) -> None:
        super().__init__()
        self.arch = arch = SDARConfig.parse(config)
        self.block_length: int | None = block.resolve_block_length(config, block_length, None, "SDAR")
        self.config = block.with_block_length(config, self.block_length, None)
        self.tokenizer = tokenizer
        self.source: Path | None = None
        self.attention = attention
        self.gradient_checkpointing = gradient_checkpointing
        ids = special_ids(config, tokenizer, arch.rows, mask_token_id)
        self.mask_token_id, self.pad_token_id, self.eos_token_id, self.stop_token_ids = ids
        stack = [
            decoder.Layer(arch.eps, arch.attention, decoder.GatedMLP(arch.attention.width, arch.mlp_width))
            for _ in range(arch.layers)
        ]
        self.model = decoder.Decoder(arch.rows, stack, arch.eps, arch.attention.head_dim, arch.theta)
        self.lm_head = decoder.output_head(self.model, arch.tied)

    @property
    def blocks(self) -> nn.ModuleList:
        """The layers, in order: the units of sharding and of activation checkpointing."""
        return self.model.layers

    @staticmethod
    def matches(config: dict[str, Any]) -> bool:
        """Whether this config.json is a dense SDAR model."""
        if config.get("model_type") is not None:
            return config["model_type"] == "sdar"
        return config.get("architectures") == ["SDARForCausalLM"]

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        dtype: str | None = None,
        attention: str = "sdpa",
        gradient_checkpointing: bool = False,
        block_length: int | None = None,
        mask_token_id: int | None = None,
    ) -> SDAR:
        """Read a checkpoint in the published layout; see `read_policy` and the constructor."""
        options = {"attention": attention, "gradient_checkpointing": gradient_checkpointing}
        return read_policy(cls, path, dtype, block_length=block_length, mask_token_id=mask_token_id, **options)

    @classmethod
    def from_config(cls, config: dict[str, Any], tokenizer: Any, seed: int) -> SDAR:
        """A policy with random float32 weights drawn from `seed` alone; see `fill_randomly`."""
        with torch.device("meta"):
            policy = cls(config, tokenizer)
        layers.fill_randomly(policy.to_empty(device="cpu"), seed, residual=("o_proj", "down_proj"))
        return policy

    def hidden_states(self, ids: Tensor, attention_mask: Tensor | None = None, view: View | None = None) -> Tensor:
        """See `PolicyModel.hidden_states`; without a view every token sees its block and those before it."""
        assert self.block_length is not None
        view = block.causal_view(ids, attention_mask, self.block_length) if view is None else view
        return self.model(ids, None, view, self.attention, self.gradient_checkpointing)

    def denoise(
        self,
        noisy_ids: Tensor,
        clean_ids: Tensor,
        attention_mask: Tensor | None = None,
        block_ids: Tensor | None = None,
    ) -> Tensor:
        """See `PolicyModel.denoise` and `block.denoise`."""
        assert self.block_length is not None

        def run(ids: Tensor, view: View) -> Tensor:
            return self.hidden_states(ids, None, view)

        return block.denoise(run, noisy_ids, clean_ids, attention_mask, block_ids, self.block_length)

    def logits(self, hidden: Tensor) -> Tensor:
        """Output head, [..., H] -> [..., V] with V the rows of the embedding."""
        return decoder.head_logits(self.model, self.lm_head, hidden)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits [B, L, V] of the ids [B, L], each token seeing its block and those before it."""
        return self.logits(self.hidden_states(ids, attention_mask))

    def save_pretrained(self, folder: Path) -> None:
        """Write weights, config and tokenizer in the published layout; see `save_checkpoint`."""
        save_checkpoint(folder, self.state_dict(), self.config, self.tokenizer, self.source)
