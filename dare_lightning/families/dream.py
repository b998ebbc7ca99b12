"""Dream: Qwen2.5's layout turned bidirectional, with the next-token head of its parent (7B, DiffuCoder, Dream-Coder).

Source: Ye et al. 2025, arXiv:2508.15487. Module names equal the published state-dict keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dare_lightning.families import config as keys
from dare_lightning.families import decoder, layers
from dare_lightning.families.attention import AttentionName, View, needed_key_mask
from dare_lightning.families.checkpoint import save_checkpoint
from dare_lightning.families.load import read_policy
from dare_lightning.families.tokenizer import special_ids

# What this computation is written for. Absent keys mean the published value, as the published config class has it.
_ALLOWED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0,),
    "rope_scaling": (None,),
    "use_sliding_window": (False,),
    "use_mrope": (False, None),
}


@dataclass(frozen=True)
class DreamConfig:
    """The sizes that config.json sets.

    Attributes:
        layers: num_hidden_layers.
        mlp_width: intermediate_size.
        rows: vocab_size, the rows of the embedding and the output head.
        tied: the head is the embedding.
        eps: of the RMS norms.
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
    def parse(cls, config: dict[str, Any]) -> DreamConfig:
        """Read a config.json; keys that do not change the computation are ignored.

        Raises:
            ValueError: a key is missing, or has a value that this family does not compute.
        """
        sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        others = ("vocab_size", "tie_word_embeddings", "rms_norm_eps", "rope_theta")
        keys.require_keys(config, (*sizes, *others), "Dream")
        keys.require_values(config, _ALLOWED_VALUES, "Dream")
        width, mlp_width, depth, heads, kv_heads = (keys.whole(config, key) for key in sizes)
        return cls(
            layers=depth,
            mlp_width=mlp_width,
            rows=keys.whole(config, "vocab_size"),
            tied=keys.switch(config, "tie_word_embeddings"),
            eps=keys.number(config, "rms_norm_eps"),
            theta=keys.number(config, "rope_theta"),
            attention=decoder.AttentionShape(width, heads, kv_heads, keys.head_dim(width, heads), bias=True),
        )


class Dream(nn.Module):
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
    block_length: int | None = None
    left_context: int = 1
    attention = AttentionName()

    def __init__(
        self, config: dict[str, Any], tokenizer: Any, attention: str = "sdpa", gradient_checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.arch = arch = DreamConfig.parse(config)
        self.config = config
        self.tokenizer = tokenizer
        self.source: Path | None = None
        self.attention = attention
        self.gradient_checkpointing = gradient_checkpointing
        ids = special_ids(config, tokenizer, arch.rows)
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

    @classmethod
    def from_config(cls, config: dict[str, Any], tokenizer: Any, seed: int) -> Dream:
        """A policy with random float32 weights drawn from `seed` alone; see `fill_randomly`."""
        with torch.device("meta"):
            policy = cls(config, tokenizer)
        layers.fill_randomly(policy.to_empty(device="cpu"), seed, residual=("o_proj", "down_proj"))
        return policy

    def hidden_states(self, ids: Tensor, attention_mask: Tensor | None = None, view: View | None = None) -> Tensor:
        """See `PolicyModel.hidden_states`; aligned: the states of the existing token before each position."""
        raw = self.model(ids, attention_mask, view, self.attention, self.gradient_checkpointing)
        return _shifted(raw, attention_mask if view is None else None)

    def denoise(
        self,
        noisy_ids: Tensor,
        clean_ids: Tensor,
        attention_mask: Tensor | None = None,
        block_ids: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [B, L, H] of the noisy tokens; a masked family looks at neither clean tokens nor blocks."""
        return self.hidden_states(noisy_ids, attention_mask)

    def logits(self, hidden: Tensor) -> Tensor:
        """Output head, [..., H] -> [..., V] with V the rows of the embedding."""
        return decoder.head_logits(self.model, self.lm_head, hidden)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Aligned logits [B, L, V] of the ids [B, L]."""
        return self.logits(self.hidden_states(ids, attention_mask))

    def save_pretrained(self, folder: Path) -> None:
        """Write weights, config and tokenizer in the published layout; see `save_checkpoint`."""
        save_checkpoint(folder, self.state_dict(), self.config, self.tokenizer, self.source)


def _shifted(raw: Tensor, attention_mask: Tensor | None) -> Tensor:
    """At each position of raw [B, L, H], the state of the existing token before it; its own where there is none."""
    exists = needed_key_mask(attention_mask)
    if exists is None:
        return torch.cat([raw[:, :1], raw[:, :-1]], dim=1)
    own = torch.arange(raw.shape[1], device=raw.device)
    last_seen = torch.where(exists, own, -1).cummax(1).values
    before = nn.functional.pad(last_seen[:, :-1], (1, 0), value=-1)
    return raw[torch.arange(len(raw), device=raw.device)[:, None], torch.where(before < 0, own, before)]
