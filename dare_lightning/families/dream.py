"""Dream: Qwen2.5's layout turned bidirectional, with the next-token head of its parent (7B, DiffuCoder, Dream-Coder).

Source: Ye et al. 2025, arXiv:2508.15487. Module names equal the published state-dict keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dare_lightning.families import config as keys
from dare_lightning.families import decoder
from dare_lightning.families.attention import View, needed_key_mask
from dare_lightning.families.load import read_policy
from dare_lightning.families.policy import MaskedPolicy

# What this computation is written for. Absent keys mean the published value, as the published config class has it.
_ALLOWED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0,),
    "rope_scaling": (None,),
    "use_sliding_window": (False,),
    "use_mrope": (False, None),
}


def dense_config(config: dict[str, Any]) -> decoder.DenseConfig:
    """The sizes that config.json sets; see `DenseConfig.parse`."""

    def attention(width: int, heads: int, kv_heads: int, eps: float) -> decoder.AttentionShape:
        return decoder.AttentionShape(width, heads, kv_heads, keys.head_dim(width, heads), bias=True)

    return decoder.DenseConfig.parse(config, "Dream", _ALLOWED_VALUES, attention)


class Dream(MaskedPolicy):
    """A `PolicyModel` of the Dream family.

    The published head scores the token after its position. Hidden states are shifted by one token here, so that
    position i predicts token i as in every other family; the first token of a sequence has none before it and
    keeps its own state, from which the model was never trained to predict it.

    Upstream marks the embedding row of the padding token, which is also the end of text, as one that receives no
    gradient. Here it is trained like the others.

    Args:
        config: the content of config.json; kept unchanged, and written back on save.
        tokenizer: the checkpoint's tokenizer.
        attention: kernel name ("eager", "sdpa", "flex", "varlen"); may be set again at any time.
        gradient_checkpointing: keep only each layer's input for the backward pass.

    Raises:
        ValueError: the config is not one that this family computes, or there is no mask token.
    """

    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    left_context: int = 1

    def __init__(
        self, config: dict[str, Any], tokenizer: Any, attention: str = "sdpa", gradient_checkpointing: bool = False
    ) -> None:
        arch = dense_config(config)
        super().__init__(config, tokenizer, arch.rows, attention, gradient_checkpointing)
        self.arch = arch
        self.model = arch.decoder()
        self.lm_head = decoder.output_head(self.model, arch.tied)

    @staticmethod
    def matches(config: dict[str, Any]) -> bool:
        """Whether this config.json is a Dream model."""
        if config.get("num_experts"):
            return False
        if config.get("model_type") is not None:
            return str(config["model_type"]).lower() == "dream"
        return config.get("architectures") == ["DreamModel"]

    @classmethod
    def from_pretrained(
        cls, path: str, dtype: str | None = None, attention: str = "sdpa", gradient_checkpointing: bool = False
    ) -> Dream:
        """Read a checkpoint in the published layout; see `read_policy` and the constructor."""
        return read_policy(cls, path, dtype, attention=attention, gradient_checkpointing=gradient_checkpointing)

    def hidden_states(self, ids: Tensor, attention_mask: Tensor | None = None, view: View | None = None) -> Tensor:
        """See `PolicyModel.hidden_states`; aligned: the states of the existing token before each position."""
        raw = self.read(ids, attention_mask, view)
        return _shifted(raw, attention_mask if view is None else None)


def _shifted(raw: Tensor, attention_mask: Tensor | None) -> Tensor:
    """At each position of raw [B, L, H], the state of the existing token before it; its own where there is none."""
    exists = needed_key_mask(attention_mask)
    if exists is None:
        return torch.cat([raw[:, :1], raw[:, :-1]], dim=1)
    own = torch.arange(raw.shape[1], device=raw.device)
    last_seen = torch.where(exists, own, -1).cummax(1).values
    before = nn.functional.pad(last_seen[:, :-1], (1, 0), value=-1)
    return raw[torch.arange(len(raw), device=raw.device)[:, None], torch.where(before < 0, own, before)]
