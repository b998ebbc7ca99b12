"""LLaDA: a bidirectional LLaMA-style denoiser with OLMo's names (8B Base, 8B Instruct, 1.5).

Source: Nie et al. 2025, arXiv:2502.09992. Module names equal the published state-dict keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from dare_lightning.families import config as keys
from dare_lightning.families import layers
from dare_lightning.families.attention import Context, Rotary, View, attend, run_stack
from dare_lightning.families.load import read_policy
from dare_lightning.families.policy import MaskedPolicy

# What the published computation is written for; anything else would load and then answer wrongly.
_REQUIRED_VALUES: dict[str, tuple[Any, ...]] = {
    "block_type": ("llama",),
    "block_group_size": (1,),
    "activation_type": ("silu",),
    "layer_norm_type": ("rms",),
    "rope": (True,),
    "alibi": (False,),
    "attention_layer_norm": (False,),
    "include_bias": (False,),
    "include_qkv_bias": (False, None),
    "bias_for_layer_norm": (False, None),
    "input_emb_norm": (False,),
    "scale_logits": (False,),
    "attention_dropout": (0,),
    "residual_dropout": (0,),
    "embedding_dropout": (0,),
}


@dataclass(frozen=True)
class LLaDAConfig:
    """The sizes that config.json sets.

    Attributes:
        width: d_model.
        layers, heads, kv_heads: n_layers, n_heads, n_kv_heads.
        mlp_width: inner size of the gated MLP.
        rows: rows of the embedding and the output head, at least the vocabulary's size.
        tied: the head is the embedding.
        eps: of the RMS norms.
        theta: base of the rotary angles.
        full_precision_rotary: rotate in float32 whatever the activations are.
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    mlp_width: int
    rows: int
    tied: bool
    eps: float
    theta: float
    full_precision_rotary: bool

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.width // self.heads

    @classmethod
    def parse(cls, config: dict[str, Any]) -> LLaDAConfig:
        """Read a config.json; keys that do not change the computation are ignored.

        Raises:
            ValueError: a key is missing, or has a value that this family does not compute.
        """
        sizes = ("d_model", "n_layers", "n_heads", "vocab_size", "rms_norm_eps", "rope_theta")
        shape = ("n_kv_heads", "mlp_hidden_size", "embedding_size", "weight_tying", "rope_full_precision")
        keys.require_keys(config, (*_REQUIRED_VALUES, *sizes, *shape), "LLaDA")
        keys.require_values(config, _REQUIRED_VALUES, "LLaDA")
        vocab_size = keys.whole(config, "vocab_size")
        parsed = cls(
            width=keys.whole(config, "d_model"),
            layers=keys.whole(config, "n_layers"),
            heads=keys.whole(config, "n_heads"),
            kv_heads=_kv_heads(config),
            mlp_width=_mlp_width(config),
            rows=config["embedding_size"] or vocab_size,
            tied=keys.switch(config, "weight_tying"),
            eps=keys.number(config, "rms_norm_eps"),
            theta=keys.number(config, "rope_theta"),
            full_precision_rotary=keys.switch(config, "rope_full_precision"),
        )
        parsed._check_shapes(vocab_size)
        return parsed

    def _check_shapes(self, vocab_size: int) -> None:
        if self.width % self.heads or self.head_dim % 2:
            raise ValueError(f"d_model={self.width} over n_heads={self.heads} does not give heads of an even size")
        if self.heads % self.kv_heads:
            raise ValueError(f"n_heads={self.heads} is not a multiple of n_kv_heads={self.kv_heads}")
        if self.rows < vocab_size:
            raise ValueError(f"embedding_size={self.rows} is smaller than vocab_size={vocab_size}")


class Block(nn.Module):
    """One pre-norm layer: attention, then a gated MLP. `ff_proj` is the gate, `ff_out` the down projection."""

    def __init__(self, arch: LLaDAConfig) -> None:
        super().__init__()
        kv_width = arch.kv_heads * arch.head_dim
        self.head_dim = arch.head_dim
        self.attn_norm = layers.RMSNorm(arch.width, arch.eps)
        self.q_proj = nn.Linear(arch.width, arch.width, bias=False)
        self.k_proj = nn.Linear(arch.width, kv_width, bias=False)
        self.v_proj = nn.Linear(arch.width, kv_width, bias=False)
        self.attn_out = nn.Linear(arch.width, arch.width, bias=False)
        self.ff_norm = layers.RMSNorm(arch.width, arch.eps)
        self.ff_proj = nn.Linear(arch.width, arch.mlp_width, bias=False)
        self.up_proj = nn.Linear(arch.width, arch.mlp_width, bias=False)
        self.ff_out = nn.Linear(arch.mlp_width, arch.width, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        normed = self.attn_norm(x)
        q, k, v = (layers.split_heads(f(normed), self.head_dim) for f in (self.q_proj, self.k_proj, self.v_proj))
        x = x + self.attn_out(attend(q, k, v, context))
        normed = self.ff_norm(x)
        return x + self.ff_out(F.silu(self.ff_proj(normed)) * self.up_proj(normed))


class Transformer(nn.Module):
    """The tensors under `model.transformer`; a tied model has no `ff_out`."""

    def __init__(self, arch: LLaDAConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(arch.rows, arch.width)
        self.blocks = nn.ModuleList(Block(arch) for _ in range(arch.layers))
        self.ln_f = layers.RMSNorm(arch.width, arch.eps)
        if not arch.tied:
            self.ff_out = nn.Linear(arch.width, arch.rows, bias=False)


class LLaDA(MaskedPolicy):
    """A `PolicyModel` of the LLaDA family. Logits at position i predict token i.

    Args:
        config: the content of config.json; kept unchanged, and written back on save.
        tokenizer: the checkpoint's tokenizer.
        attention: kernel name ("eager", "sdpa", "flex", "varlen"); may be set again at any time.
        gradient_checkpointing: keep only each block's input for the backward pass.

    Raises:
        ValueError: the config is not one that this family computes, or there is no mask token.
    """

    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "attn_out", "ff_proj", "up_proj", "ff_out")
    residual = ("attn_out", "ff_out")

    def __init__(
        self, config: dict[str, Any], tokenizer: Any, attention: str = "sdpa", gradient_checkpointing: bool = False
    ) -> None:
        arch = LLaDAConfig.parse(config)
        super().__init__(config, tokenizer, arch.rows, attention, gradient_checkpointing)
        self.arch = arch
        self.model = nn.ModuleDict({"transformer": Transformer(arch)})

    @property
    def blocks(self) -> nn.ModuleList:
        """The layers, in order: the units of sharding and of activation checkpointing."""
        return self._transformer.blocks

    @property
    def head(self) -> nn.Module:
        """See `Policy.head`."""
        return self._transformer.wte if self.arch.tied else self._transformer.ff_out

    @property
    def _transformer(self) -> Transformer:
        transformer = self.model["transformer"]
        assert isinstance(transformer, Transformer)
        return transformer

    @staticmethod
    def matches(config: dict[str, Any]) -> bool:
        """Whether this config.json is a dense LLaDA. The mixture-of-experts models carry the same model_type."""
        if config.get("num_experts") or "MoE" in str(config.get("architectures")):
            return False
        if config.get("model_type") is not None:
            return config["model_type"] == "llada"
        return config.get("architectures") == ["LLaDAModelLM"]

    @classmethod
    def from_pretrained(
        cls, path: str, dtype: str | None = None, attention: str = "sdpa", gradient_checkpointing: bool = False
    ) -> LLaDA:
        """Read a checkpoint in the published layout; see `read_policy` and the constructor."""
        return read_policy(cls, path, dtype, attention=attention, gradient_checkpointing=gradient_checkpointing)

    def read(self, ids: Tensor, attention_mask: Tensor | None, view: View | None) -> Tensor:
        """See `Policy.read`."""
        transformer, arch = self._transformer, self.arch
        return run_stack(
            ids,
            attention_mask,
            view,
            embed=transformer.wte,
            layers=transformer.blocks,
            norm=transformer.ln_f,
            rotary=Rotary(arch.head_dim, arch.theta, wide=arch.full_precision_rotary),
            attention=self.attention,
            checkpointing=self.gradient_checkpointing,
        )


def _kv_heads(config: dict[str, Any]) -> int:
    if config["n_kv_heads"] is None:
        return 1 if config.get("multi_query_attention") else config["n_heads"]
    return keys.whole(config, "n_kv_heads")


def _mlp_width(config: dict[str, Any]) -> int:
    if config["mlp_hidden_size"] is not None:
        return keys.whole(config, "mlp_hidden_size")
    keys.require_keys(config, ["mlp_ratio"], "LLaDA")
    return int(keys.number(config, "mlp_ratio") * config["d_model"])
