"""The tiny policy of the golden files: a table of logits for each token, position and context, in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class TablePolicy(nn.Module):
    """raw[i] = W[x_i] + U[pos_i] + mean over the visible j of C[x_j]; hidden states are the logits themselves.

    Args:
        model: the `model` entry of a golden file, or its like.
        table: which of its tables is the trained one: "W", "W_old" or "W_ref".
        block_length: tokens a block; None for a masked policy that sees everything.
        block_origin: "global" numbers blocks over prompt and response together, "response" starts at the response.
    """

    def __init__(
        self, model: dict[str, Any], table: str = "W", block_length: int | None = None, block_origin: str = "global"
    ) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.tensor(model[table], dtype=torch.float64))
        self.U = torch.tensor(model["U"], dtype=torch.float64)
        self.C = torch.tensor(model["C"], dtype=torch.float64)
        self.logit_shift = int(model["logit_shift"])
        self.mask_token_id = int(model["mask_id"])
        self.pad_token_id = int(model["pad_id"])
        self.eos_token_id = int(model["eos_id"])
        self.stop_token_ids: tuple[int, ...] = (self.eos_token_id,)
        self.block_length = block_length
        self.block_origin = block_origin
        self.left_context = 0
        self.lora_targets: tuple[str, ...] = ()
        self.attention = "eager"
        self.source: Path | None = None
        self.config: dict[str, Any] = {}
        self.tokenizer: Any = None
        self.prompt_mask: Tensor | None = None
        """bool [B, L]; needed where blocks start at the response."""

    def hidden_states(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Aligned logits [B, L, V] where every token sees every other."""
        exists = torch.ones_like(ids, dtype=torch.bool) if attention_mask is None else attention_mask
        visible = exists[:, :, None] & exists[:, None, :]
        return self._shifted(self._raw(ids, _positions(exists), visible), exists)

    def denoise(
        self,
        noisy_ids: Tensor,
        clean_ids: Tensor,
        attention_mask: Tensor | None = None,
        block_ids: Tensor | None = None,
    ) -> Tensor:
        """Aligned logits [B, L, V] for the noisy half; block policies read [noisy ; clean] under the block mask."""
        if self.block_length is None:
            return self.hidden_states(noisy_ids, attention_mask)
        exists = torch.ones_like(noisy_ids, dtype=torch.bool) if attention_mask is None else attention_mask
        position = _positions(exists)
        visible = self.visibility(exists, block_ids)
        raw = self._raw(torch.cat([noisy_ids, clean_ids], 1), position.repeat(1, 2), visible)
        return self._shifted(raw[:, : noisy_ids.shape[1]], exists)

    def visibility(self, exists: Tensor, block_ids: Tensor | None = None) -> Tensor:
        """bool [B, 2L, 2L]: rows are queries of [noisy ; clean]; own blocks where none are given."""
        block = self._own_blocks(exists) if block_ids is None else block_ids
        same, later = block[:, :, None] == block[:, None, :], block[:, :, None] > block[:, None, :]
        nothing = torch.zeros_like(same)
        top, bottom = torch.cat([same, later], -1), torch.cat([nothing, same | later], -1)
        both = torch.cat([exists, exists], -1)
        return torch.cat([top, bottom], 1) & both[:, :, None] & both[:, None, :]

    def _own_blocks(self, exists: Tensor) -> Tensor:
        assert self.block_length is not None
        position = _positions(exists)
        block = position // self.block_length
        if self.block_origin == "response":
            assert self.prompt_mask is not None
            prompt = (self.prompt_mask & exists).sum(-1, keepdim=True)
            of_prompt = (prompt + self.block_length - 1) // self.block_length
            block = torch.where(position < prompt, block, of_prompt + (position - prompt) // self.block_length)
        return block

    @property
    def head_weight(self) -> None:
        """There is no head."""

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits are the hidden states."""
        return hidden

    def save_pretrained(self, folder: Path) -> None:
        """Not needed by any test."""
        raise NotImplementedError

    def _raw(self, ids: Tensor, position: Tensor, visible: Tensor) -> Tensor:
        weight = visible.double()
        context = weight @ self.C[ids] / weight.sum(-1, keepdim=True).clamp(min=1)
        return self.W[ids] + self.U[position] + context

    def _shifted(self, raw: Tensor, exists: Tensor) -> Tensor:
        if self.logit_shift == 0:
            return raw
        # The neighbour on the left is the previous token that exists; the first keeps its own logits.
        column = torch.arange(exists.shape[1]).expand_as(exists)
        last = torch.where(exists, column, -1).cummax(-1).values
        before = torch.cat([last.new_full((len(last), 1), -1), last[:, :-1]], -1)
        source = torch.where(before >= 0, before, column)
        return raw.gather(1, source[..., None].expand_as(raw))


def _positions(exists: Tensor) -> Tensor:
    return (exists.cumsum(-1) - 1).clamp(min=0)


def golden(path: Path) -> dict[str, Any]:
    """The content of a golden file."""
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def random_tables(seed: int = 0, vocabulary: int = 11, positions: int = 48, logit_shift: int = 0) -> dict[str, Any]:
    """A `model` entry with random tables."""
    draw = torch.Generator().manual_seed(seed)

    def table(rows: int) -> list[list[float]]:
        values: list[list[float]] = torch.randn(rows, vocabulary, generator=draw, dtype=torch.float64).tolist()
        return values

    tables = {name: table(vocabulary) for name in ("W", "C", "W_old", "W_ref")} | {"U": table(positions)}
    return tables | {"mask_id": vocabulary - 1, "eos_id": vocabulary - 2, "pad_id": 8, "logit_shift": logit_shift}


def sequence_batch(ids: Any, prompt_length: Any, attention_mask: Any = None, **columns: Any) -> Any:
    """A batch whose response is every existing token from `prompt_length` (a number, or one for each row) on."""
    from dare_lightning.replay.batch import SequenceBatch

    tokens = torch.as_tensor(ids)
    exists = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else torch.as_tensor(attention_mask)
    start = torch.as_tensor(prompt_length).expand(len(tokens))[:, None]
    response = exists.bool() & (torch.arange(tokens.shape[1]) >= start)
    filled = {
        "completion_mask": response,
        "noise_seed": torch.arange(len(tokens)) + 100,
        "sample_index": torch.arange(len(tokens)),
    } | columns
    return SequenceBatch(ids=tokens, attention_mask=exists.bool(), response_mask=response, **filled)
