"""LLaDA: a bidirectional LLaMA-style denoiser with OLMo's names (8B Base, 8B Instruct, 1.5).

Source: Nie et al. 2025, arXiv:2502.09992. Module names equal the published state-dict keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dare_lightning.families import layers
from dare_lightning.families import tokenizer as tokens
from dare_lightning.families.checkpoint import load_weights, read_config, resolve_folder, save_checkpoint

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
        missing = [key for key in (*_REQUIRED_VALUES, *sizes, *shape) if key not in config]
        if missing:
            raise ValueError(f"config.json of a LLaDA model lacks {', '.join(missing)}; no value is assumed for them")
        for key, allowed in _REQUIRED_VALUES.items():
            if config[key] not in allowed:
                raise ValueError(f"config.json says {key}={config[key]!r}; LLaDA here supports {_any_of(allowed)}")
        for key in sizes:
            _check_positive(key, config[key])
        for key in ("weight_tying", "rope_full_precision"):
            if not isinstance(config[key], bool):
                raise ValueError(f"config.json says {key}={config[key]!r}; it must be true or false")
        parsed = cls(
            width=config["d_model"],
            layers=config["n_layers"],
            heads=config["n_heads"],
            kv_heads=_kv_heads(config),
            mlp_width=_mlp_width(config),
            rows=config["embedding_size"] or config["vocab_size"],
            tied=config["weight_tying"],
            eps=config["rms_norm_eps"],
            theta=config["rope_theta"],
            full_precision_rotary=config["rope_full_precision"],
        )
        parsed._check_shapes(config["vocab_size"])
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

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, key_mask: Tensor | None, kernel: layers.AttentionKernel
    ) -> Tensor:
        normed = self.attn_norm(x)
        q = layers.rotate(self._heads(self.q_proj(normed)), cos, sin)
        k = layers.rotate(self._heads(self.k_proj(normed)), cos, sin)
        v = self._heads(self.v_proj(normed))
        x = x + self.attn_out(kernel(q, k, v, key_mask).transpose(1, 2).flatten(2))
        normed = self.ff_norm(x)
        return x + self.ff_out(F.silu(self.ff_proj(normed)) * self.up_proj(normed))

    def _heads(self, x: Tensor) -> Tensor:
        """[B, L, H * D] -> [B, H, L, D]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class Transformer(nn.Module):
    """The tensors under `model.transformer`; a tied model has no `ff_out`."""

    def __init__(self, arch: LLaDAConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(arch.rows, arch.width)
        self.blocks = nn.ModuleList(Block(arch) for _ in range(arch.layers))
        self.ln_f = layers.RMSNorm(arch.width, arch.eps)
        if not arch.tied:
            self.ff_out = nn.Linear(arch.width, arch.rows, bias=False)


class LLaDA(nn.Module):
    """A `PolicyModel` of the LLaDA family. Logits at position i predict token i.

    Args:
        config: the content of config.json; kept unchanged, and written back on save.
        tokenizer: the checkpoint's tokenizer.
        attention: kernel name, "eager" or "sdpa"; may be set again at any time.
        gradient_checkpointing: keep only each block's input for the backward pass.

    Raises:
        ValueError: the config is not one that this family computes, or there is no mask token.
    """

    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "attn_out", "ff_proj", "up_proj", "ff_out")
    block_length: int | None = None

    def __init__(
        self, config: dict[str, Any], tokenizer: Any, attention: str = "sdpa", gradient_checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.arch = LLaDAConfig.parse(config)
        self.config = config
        self.tokenizer = tokenizer
        self.source: Path | None = None
        self.attention = attention
        self.gradient_checkpointing = gradient_checkpointing
        self.mask_token_id = tokens.mask_token_id(config, tokenizer)
        self.pad_token_id = tokens.pad_token_id(config, tokenizer)
        self.eos_token_id = tokens.eos_token_id(config, tokenizer)
        self.stop_token_ids = tokens.stop_token_ids(self.eos_token_id, tokenizer)
        tokens.check_ids([self.mask_token_id, self.pad_token_id, *self.stop_token_ids], self.arch.rows)
        self.model = nn.ModuleDict({"transformer": Transformer(self.arch)})

    @property
    def attention(self) -> str:
        """Name of the attention kernel used now."""
        return self._attention

    @attention.setter
    def attention(self, name: str) -> None:
        layers.attention_kernel(name)
        self._attention = name

    @property
    def blocks(self) -> nn.ModuleList:
        """The layers, in order: the units of sharding and of activation checkpointing."""
        return self._transformer.blocks

    @property
    def _transformer(self) -> Transformer:
        transformer = self.model["transformer"]
        assert isinstance(transformer, Transformer)
        return transformer

    @staticmethod
    def matches(config: dict[str, Any]) -> bool:
        """Whether this config.json is a dense LLaDA. The mixture-of-experts models carry the same model_type."""
        if config.get("num_experts"):
            return False
        if config.get("model_type") is not None:
            return config["model_type"] == "llada"
        return config.get("architectures") == ["LLaDAModelLM"]

    @classmethod
    def from_pretrained(
        cls, path: str, dtype: str | None = None, attention: str = "sdpa", gradient_checkpointing: bool = False
    ) -> LLaDA:
        """Read a checkpoint in the published layout.

        Args:
            path: a folder, or a hub name where no such folder exists.
            dtype: "float32", "bfloat16" or "float16"; None or "auto" keeps what the files hold.
            attention, gradient_checkpointing: as for the constructor.

        Raises:
            FileNotFoundError: the folder, or a file in it, is missing.
            ValueError: damaged or foreign weights, another family, an unsupported config.
        """
        from dare_lightning.families.load import check_family

        folder = resolve_folder(path)
        config = read_config(folder)
        check_family(cls, config, folder)
        with torch.device("meta"):
            policy = cls(config, tokens.load_tokenizer(folder), attention, gradient_checkpointing)
        load_weights(policy, folder, dtype)
        policy.source = folder
        return policy

    @classmethod
    def from_config(cls, config: dict[str, Any], tokenizer: Any, seed: int) -> LLaDA:
        """A policy with random float32 weights drawn from `seed` alone; the global generator is left alone.

        Linear layers and embedding are normal with standard deviation 1/sqrt(fan in); the two projections that
        write to the residual stream are divided by sqrt(2 (layer + 1)), so that depth does not inflate it.
        """
        with torch.device("meta"):
            policy = cls(config, tokenizer)
        policy.to_empty(device="cpu")
        stream = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in policy.named_parameters():
                if weight.dim() == 1:
                    weight.fill_(1.0)
                else:
                    weight.normal_(std=weight.shape[1] ** -0.5 * _residual_scale(name), generator=stream)
        return policy

    def hidden_states(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Final hidden states, float [B, L, H].

        Args:
            ids: int64 [B, L].
            attention_mask: bool [B, L] over keys, True = token exists. Other positions still get an output, which
                means nothing.
        """
        transformer = self._transformer
        x = transformer.wte(ids)
        positions = torch.arange(ids.shape[1], device=ids.device)
        precision = torch.promote_types(x.dtype, torch.float32) if self.arch.full_precision_rotary else x.dtype
        cos, sin = layers.rotary_tables(positions, self.arch.head_dim, self.arch.theta, precision)
        key_mask = layers.needed_key_mask(attention_mask)
        kernel = layers.attention_kernel(self.attention)
        for block in transformer.blocks:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, key_mask, kernel, use_reentrant=False)
            else:
                x = block(x, cos, sin, key_mask, kernel)
        return transformer.ln_f(x)

    def denoise(self, noisy_ids: Tensor, clean_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Hidden states [B, L, H] of the noisy tokens; a masked family does not look at the clean ones."""
        return self.hidden_states(noisy_ids, attention_mask)

    def logits(self, hidden: Tensor) -> Tensor:
        """Output head, [..., H] -> [..., V] with V the rows of the embedding."""
        if self.arch.tied:
            return F.linear(hidden, self._transformer.wte.weight)
        return self._transformer.ff_out(hidden)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits [B, L, V] of the ids [B, L]."""
        return self.logits(self.hidden_states(ids, attention_mask))

    def save_pretrained(self, folder: Path) -> None:
        """Write weights, config and tokenizer in the published layout; see `save_checkpoint`."""
        save_checkpoint(folder, self.state_dict(), self.config, self.tokenizer, self.source)


def _residual_scale(name: str) -> float:
    parts = name.split(".")
    if "blocks" in parts and parts[-2] in ("attn_out", "ff_out"):
        return (2 * (int(parts[parts.index("blocks") + 1]) + 1)) ** -0.5
    return 1.0


def _kv_heads(config: dict[str, Any]) -> int:
    if config["n_kv_heads"] is None:
        return 1 if config.get("multi_query_attention") else config["n_heads"]
    return _check_positive("n_kv_heads", config["n_kv_heads"])


def _mlp_width(config: dict[str, Any]) -> int:
    if config["mlp_hidden_size"] is not None:
        return _check_positive("mlp_hidden_size", config["mlp_hidden_size"])
    if "mlp_ratio" not in config:
        raise ValueError("config.json says mlp_hidden_size=null and has no mlp_ratio; one of them sets the MLP's size")
    return int(_check_positive("mlp_ratio", config["mlp_ratio"]) * config["d_model"])


def _check_positive(key: str, value: Any) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    whole = key not in ("rms_norm_eps", "rope_theta", "mlp_ratio")
    if not number or value <= 0 or (whole and value != int(value)):
        kind = "whole number" if whole else "number"
        raise ValueError(f"config.json says {key}={value!r}; it must be a positive {kind}")
    return value


def _any_of(allowed: tuple[Any, ...]) -> str:
    return " or ".join(repr(value) for value in allowed)
