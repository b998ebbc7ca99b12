"""What every family does in the same way: its ids and settings, its head, random weights, saving, and both passes.

A family adds its config, its stack and the names of its weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dare_lightning.families import block, layers
from dare_lightning.families.attention import AttentionName, View
from dare_lightning.families.checkpoint import save_checkpoint
from dare_lightning.families.tokenizer import special_ids


class Policy(nn.Module):
    """The parts of a `PolicyModel` that do not depend on how it diffuses.

    A family sets `model`, called as `decoder.Decoder` is, and `lm_head`, None where the head is the embedding; or it
    overrides `read`, `blocks` and `head`.

    Args:
        config: the content of config.json, written back on save.
        tokenizer: the checkpoint's tokenizer.
        rows: of the embedding; every special id must be below it.
        attention: kernel name ("eager", "sdpa", "flex", "varlen"); may be set again at any time.
        gradient_checkpointing: keep only each layer's input for the backward pass.
        mask_token_id: where neither config.json nor the tokenizer says.

    Raises:
        ValueError: there is no such kernel, no mask token, or an id that the embedding does not have.
    """

    left_context: int = 0
    attention = AttentionName()
    residual: ClassVar[tuple[str, ...]] = ("o_proj", "down_proj")
    """Names of the projections that write to the residual stream; see `fill_randomly`."""

    model: Any
    lm_head: nn.Module | None

    def __init__(
        self,
        config: dict[str, Any],
        tokenizer: Any,
        rows: int,
        attention: str,
        gradient_checkpointing: bool,
        mask_token_id: int | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.tokenizer = tokenizer
        self.source: Path | None = None
        self.attention = attention
        self.gradient_checkpointing = gradient_checkpointing
        ids = special_ids(config, tokenizer, rows, mask_token_id)
        self.mask_token_id, self.pad_token_id, self.eos_token_id, self.stop_token_ids = ids

    @classmethod
    def from_config(cls, config: dict[str, Any], tokenizer: Any, seed: int) -> Self:
        """A policy with random float32 weights drawn from `seed` alone; see `fill_randomly`."""
        build: Any = cls  # every family's constructor begins with these two
        with torch.device("meta"):
            policy = build(config, tokenizer)
        layers.fill_randomly(policy.to_empty(device="cpu"), seed, residual=cls.residual)
        return policy

    @property
    def blocks(self) -> nn.ModuleList:
        """The layers, in order: the units of sharding and of activation checkpointing."""
        return self.model.layers

    def read(self, ids: Tensor, attention_mask: Tensor | None, view: View | None) -> Tensor:
        """The stack's own final hidden states, float [B, L, H]; arguments as `run_stack`."""
        return self.model(ids, attention_mask, view, self.attention, self.gradient_checkpointing)

    def hidden_states(self, ids: Tensor, attention_mask: Tensor | None = None, view: View | None = None) -> Tensor:
        """See `PolicyModel.hidden_states`."""
        raise NotImplementedError

    @property
    def head(self) -> nn.Module:
        """What makes logits of the stack's output: a layer, or the embedding."""
        return self.model.embed_tokens if self.lm_head is None else self.lm_head

    @property
    def head_weight(self) -> Tensor | None:
        """float [V, H] where the head is a product with it; None where it is more, as under an adapter."""
        head = self.head
        # A layer that was adapted or parametrised is of another class.
        return head.weight if type(head) is nn.Embedding or type(head) is nn.Linear else None

    def logits(self, hidden: Tensor) -> Tensor:
        """Output head, [..., H] -> [..., V] with V the rows of the embedding."""
        head = self.head
        return F.linear(hidden, head.weight) if isinstance(head, nn.Embedding) else head(hidden)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits [B, L, V] of the ids [B, L], as `hidden_states` sees them."""
        return self.logits(self.hidden_states(ids, attention_mask))

    def save_pretrained(self, folder: Path) -> None:
        """Write weights, config and tokenizer in the published layout; see `save_checkpoint`."""
        save_checkpoint(folder, self.state_dict(), self.config, self.tokenizer, self.source)


class MaskedPolicy(Policy):
    """A family whose tokens all see each other."""

    block_length: int | None = None

    def hidden_states(self, ids: Tensor, attention_mask: Tensor | None = None, view: View | None = None) -> Tensor:
        """See `PolicyModel.hidden_states`."""
        return self.read(ids, attention_mask, view)

    def denoise(
        self,
        noisy_ids: Tensor,
        clean_ids: Tensor,
        attention_mask: Tensor | None = None,
        block_ids: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [B, L, H] of the noisy tokens; a masked family looks at neither clean tokens nor blocks."""
        return self.hidden_states(noisy_ids, attention_mask)


class BlockPolicy(Policy):
    """A family whose tokens see their block and those before it.

    Args:
        config: the content of config.json; it says the block length on save where reading it again would not.
        tokenizer, rows, attention, gradient_checkpointing, mask_token_id: as in `Policy`.
        block_length: tokens a block, where config.json does not say (`block_size`).
        published_length: the family's block length where neither says; None where none is assumed.

    Raises:
        ValueError: as in `Policy`; no block length, or two that contradict.
    """

    def __init__(
        self,
        config: dict[str, Any],
        tokenizer: Any,
        rows: int,
        attention: str,
        gradient_checkpointing: bool,
        block_length: int | None,
        mask_token_id: int | None,
        published_length: int | None,
    ) -> None:
        length = block.resolve_block_length(config, block_length, published_length, type(self).__name__)
        said = block.with_block_length(config, length, published_length)
        super().__init__(said, tokenizer, rows, attention, gradient_checkpointing, mask_token_id)
        self.block_length: int | None = length

    def hidden_states(self, ids: Tensor, attention_mask: Tensor | None = None, view: View | None = None) -> Tensor:
        """See `PolicyModel.hidden_states`; without a view every token sees its block and those before it."""
        assert self.block_length is not None
        view = block.causal_view(ids, attention_mask, self.block_length) if view is None else view
        return self.read(ids, None, view)

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
