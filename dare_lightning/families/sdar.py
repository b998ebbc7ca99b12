"""SDAR: Qwen3's layout turned into block diffusion (1.7B, 4B, 8B). Module names equal the published state-dict keys.

Source: Cheng et al. 2025, arXiv:2510.06303.
"""

from __future__ import annotations

from typing import Any

from dare_lightning.families import config as keys
from dare_lightning.families import decoder
from dare_lightning.families.load import read_policy
from dare_lightning.families.policy import BlockPolicy

# What this computation is written for. The published config class has no defaults that differ.
_ALLOWED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0,),
    "rope_scaling": (None,),
    "use_sliding_window": (False,),
}


def dense_config(config: dict[str, Any], family: str) -> decoder.DenseConfig:
    """The sizes that config.json sets, of what dense and sparse models have in common; see `DenseConfig.parse`."""

    def attention(width: int, heads: int, kv_heads: int, eps: float) -> decoder.AttentionShape:
        # A head's size is a key of its own: heads * head_dim need not be hidden_size.
        return decoder.AttentionShape(width, heads, kv_heads, keys.whole(config, "head_dim"), norm_eps=eps)

    return decoder.DenseConfig.parse(config, family, _ALLOWED_VALUES, attention, ("head_dim",))


class SDAR(BlockPolicy):
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

    def __init__(
        self,
        config: dict[str, Any],
        tokenizer: Any,
        attention: str = "sdpa",
        gradient_checkpointing: bool = False,
        block_length: int | None = None,
        mask_token_id: int | None = None,
    ) -> None:
        arch = dense_config(config, "SDAR")
        settings = (attention, gradient_checkpointing, block_length, mask_token_id)
        super().__init__(config, tokenizer, arch.rows, *settings, published_length=None)
        self.arch = arch
        self.model = arch.decoder()
        self.lm_head = decoder.output_head(self.model, arch.tied)

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
