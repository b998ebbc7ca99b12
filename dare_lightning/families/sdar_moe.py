"""SDAR-MoE: Qwen3-MoE's layout turned into block diffusion (30B-A3B).

Source: Cheng et al. 2025, arXiv:2510.06303. Module names equal the published state-dict keys, but for the experts,
whose weights are stacked (`experts.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from dare_lightning.families import config as keys
from dare_lightning.families import decoder
from dare_lightning.families.experts import MixtureOfExperts
from dare_lightning.families.load import read_policy
from dare_lightning.families.policy import BlockPolicy
from dare_lightning.families.sdar import dense_config

BLOCK_LENGTH = 4
"""Of the published model, whose config.json does not say it."""


@dataclass(frozen=True)
class SDARMoEConfig:
    """The sizes that config.json sets.

    Attributes:
        base: what the dense models have as well.
        sparse: for each layer, whether its MLP is a mixture of experts.
        experts, top_k: num_experts, num_experts_per_tok.
        expert_width: moe_intermediate_size.
        normalize: norm_topk_prob, divide the chosen experts' weights by their sum.
    """

    base: decoder.DenseConfig
    sparse: tuple[bool, ...]
    experts: int
    top_k: int
    expert_width: int
    normalize: bool

    @classmethod
    def parse(cls, config: dict[str, Any]) -> SDARMoEConfig:
        """Read a config.json; keys that do not change the computation are ignored.

        Raises:
            ValueError: a key is missing, or has a value that this family does not compute.
        """
        sizes = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")
        keys.require_keys(config, (*sizes, "mlp_only_layers", "norm_topk_prob"), "SDAR-MoE")
        base = dense_config(config, "SDAR-MoE")
        experts, top_k, expert_width, every = (keys.whole(config, key) for key in sizes)
        if top_k > experts:
            raise ValueError(f"config.json says num_experts_per_tok={top_k}, more than num_experts={experts}")
        dense = config["mlp_only_layers"]
        if not isinstance(dense, list) or any(number not in range(base.layers) for number in dense):
            raise ValueError(
                f"config.json says mlp_only_layers={dense!r}; it must be a list of layers below num_hidden_layers="
                f"{base.layers}"
            )
        return cls(
            base=base,
            sparse=tuple(i not in dense and (i + 1) % every == 0 for i in range(base.layers)),
            experts=experts,
            top_k=top_k,
            expert_width=expert_width,
            normalize=keys.switch(config, "norm_topk_prob"),
        )


class SDARMoE(BlockPolicy):
    """A `PolicyModel` of the SDAR-MoE family. Logits at position i predict token i.

    Args:
        config: the content of config.json; kept unchanged, and written back on save.
        tokenizer: the checkpoint's tokenizer, which declares the mask token: the published config has no id for it.
        attention: kernel name ("eager", "sdpa", "flex", "varlen"); may be set again at any time.
        gradient_checkpointing: keep only each layer's input for the backward pass.
        block_length: tokens a block, where config.json does not say (`block_size`); None for the published length.
        mask_token_id: where neither config.json nor the tokenizer says.

    Raises:
        ValueError: the config is not one that this family computes, there is no mask token, or two block lengths that
            contradict.
    """

    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")

    def __init__(
        self,
        config: dict[str, Any],
        tokenizer: Any,
        attention: str = "sdpa",
        gradient_checkpointing: bool = False,
        block_length: int | None = None,
        mask_token_id: int | None = None,
    ) -> None:
        arch = SDARMoEConfig.parse(config)
        settings = (attention, gradient_checkpointing, block_length, mask_token_id)
        super().__init__(config, tokenizer, arch.base.rows, *settings, published_length=BLOCK_LENGTH)
        self.arch = arch
        base = arch.base
        stack = [decoder.Layer(base.eps, base.attention, _mlp(arch, sparse)) for sparse in arch.sparse]
        self.model = decoder.Decoder(base.rows, stack, base.eps, base.attention.head_dim, base.theta)
        self.lm_head = decoder.output_head(self.model, base.tied)

    @staticmethod
    def matches(config: dict[str, Any]) -> bool:
        """Whether this config.json is an SDAR-MoE model."""
        if config.get("model_type") is not None:
            return config["model_type"] == "sdar_moe"
        return config.get("architectures") == ["SDARMoeForCausalLM"]

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        dtype: str | None = None,
        attention: str = "sdpa",
        gradient_checkpointing: bool = False,
        block_length: int | None = None,
        mask_token_id: int | None = None,
    ) -> SDARMoE:
        """Read a checkpoint in the published layout; see `read_policy` and the constructor."""
        options = {"attention": attention, "gradient_checkpointing": gradient_checkpointing}
        return read_policy(cls, path, dtype, block_length=block_length, mask_token_id=mask_token_id, **options)


def _mlp(arch: SDARMoEConfig, sparse: bool) -> nn.Module:
    width = arch.base.attention.width
    if not sparse:
        return decoder.GatedMLP(width, arch.base.mlp_width)
    return MixtureOfExperts(width, arch.expert_width, arch.experts, arch.top_k, bias=False, normalize=arch.normalize)
