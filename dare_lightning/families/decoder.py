"""The transformer stack of the families that use Qwen's names: norm, attention, norm, MLP, both residual."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from dare_lightning.families import config as keys
from dare_lightning.families import layers
from dare_lightning.families.attention import Context, Rotary, View, attend, run_stack


@dataclass(frozen=True)
class AttentionShape:
    """Sizes and variants of the attention of one layer.

    Attributes:
        width: of the residual stream.
        heads, kv_heads, head_dim: consecutive query heads share a key/value head.
        bias: whether the q, k and v projections have one.
        norm_eps: of the norms over each head's query and key; None means that there are none.
        clip: bound of queries, keys and values after those norms, or None.
    """

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False
    norm_eps: float | None = None
    clip: float | None = None

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"num_attention_heads={self.heads} is not a multiple of num_key_value_heads={self.kv_heads}"
            )


@dataclass(frozen=True)
class DenseConfig:
    """The sizes that config.json sets for a stack of equal layers without experts.

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
    attention: AttentionShape

    @classmethod
    def parse(
        cls,
        config: dict[str, Any],
        family: str,
        allowed: dict[str, tuple[Any, ...]],
        attention: Callable[[int, int, int, float], AttentionShape],
        own_keys: tuple[str, ...] = (),
    ) -> DenseConfig:
        """Read a config.json; keys that do not change the computation are ignored.

        Args:
            family: for the errors.
            allowed: the values of other keys that the computation is written for.
            attention: (width, heads, key/value heads, eps of the norms) -> the attention of every layer.
            own_keys: what `attention` reads besides.

        Raises:
            ValueError: a key is missing, or has a value that this family does not compute.
        """
        sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        others = (*own_keys, "vocab_size", "tie_word_embeddings", "rms_norm_eps", "rope_theta")
        keys.require_keys(config, (*sizes, *others), family)
        keys.require_values(config, allowed, family)
        width, mlp_width, depth, heads, kv_heads = (keys.whole(config, key) for key in sizes)
        eps = keys.number(config, "rms_norm_eps")
        return cls(
            layers=depth,
            mlp_width=mlp_width,
            rows=keys.whole(config, "vocab_size"),
            tied=keys.switch(config, "tie_word_embeddings"),
            eps=eps,
            theta=keys.number(config, "rope_theta"),
            attention=attention(width, heads, kv_heads, eps),
        )

    def decoder(self) -> Decoder:
        """The stack of these sizes."""
        stack = [
            Layer(self.eps, self.attention, GatedMLP(self.attention.width, self.mlp_width)) for _ in range(self.layers)
        ]
        return Decoder(self.rows, stack, self.eps, self.attention.head_dim, self.theta)


class Attention(nn.Module):
    """Bidirectional attention with rotary positions."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__()
        inner, kv_inner = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.head_dim, self.clip = shape.head_dim, shape.clip
        self.q_proj = nn.Linear(shape.width, inner, bias=shape.bias)
        self.k_proj = nn.Linear(shape.width, kv_inner, bias=shape.bias)
        self.v_proj = nn.Linear(shape.width, kv_inner, bias=shape.bias)
        self.o_proj = nn.Linear(inner, shape.width, bias=False)
        self.q_norm = None if shape.norm_eps is None else layers.RMSNorm(shape.head_dim, shape.norm_eps)
        self.k_norm = None if shape.norm_eps is None else layers.RMSNorm(shape.head_dim, shape.norm_eps)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, k, v = (layers.split_heads(f(x), self.head_dim) for f in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.clip is not None:
            q, k, v = (part.clamp(-self.clip, self.clip) for part in (q, k, v))
        return self.o_proj(attend(q, k, v, context))


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), without biases."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm layer.

    Args:
        eps: of both norms.
        shape: of the attention.
        mlp: [..., H] -> [..., H].
        shared_expert: a second MLP of the same input, added to the first; None where there is none.
    """

    def __init__(
        self, eps: float, shape: AttentionShape, mlp: nn.Module, shared_expert: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.input_layernorm = layers.RMSNorm(shape.width, eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = layers.RMSNorm(shape.width, eps)
        self.mlp = mlp
        self.shared_expert = shared_expert

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context)
        normed = self.post_attention_layernorm(x)
        out = self.mlp(normed)
        if self.shared_expert is not None:
            out = out + self.shared_expert(normed)
        return x + out


class Decoder(nn.Module):
    """The tensors under `model`: embedding, layers and the last norm.

    Args:
        rows: of the embedding.
        stack: the layers, in order.
        eps: of the last norm.
        rotary_dim, theta: how many dimensions of a head are turned, and the base of the angles.
    """

    def __init__(self, rows: int, stack: list[Layer], eps: float, rotary_dim: int, theta: float) -> None:
        super().__init__()
        width = stack[0].input_layernorm.weight.shape[0]
        self.rotary_dim, self.theta = rotary_dim, theta
        self.embed_tokens = nn.Embedding(rows, width)
        self.layers = nn.ModuleList(stack)
        self.norm = layers.RMSNorm(width, eps)

    def forward(
        self,
        ids: Tensor,
        attention_mask: Tensor | None,
        view: View | None,
        attention: str,
        gradient_checkpointing: bool,
    ) -> Tensor:
        """Final hidden states [B, L, H] of ids [B, L], not aligned; sines and cosines in the activations' dtype."""
        return run_stack(
            ids,
            attention_mask,
            view,
            embed=self.embed_tokens,
            layers=self.layers,
            norm=self.norm,
            rotary=Rotary(self.rotary_dim, self.theta),
            attention=attention,
            checkpointing=gradient_checkpointing,
        )


def output_head(decoder: Decoder, tied: bool) -> nn.Linear | None:
    """The head `lm_head` of a model; None where it is the embedding."""
    rows, width = decoder.embed_tokens.weight.shape
    return None if tied else nn.Linear(width, rows, bias=False)
