"""What block-diffusion families share: block lengths, and passes over clean tokens with any number of noisy copies.

A noisy block reads itself and the clean blocks before it. So the clean half is computed once for all noisy rows of a
sequence, only as far as something reads it; a noisy copy only of the blocks in which it differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dare_lightning.families import config as keys
from dare_lightning.families.attention import View
from dare_lightning.families.visibility import BlockVisibility

Pass = Callable[[Tensor, View], Tensor]
"""(ids int64 [B, L], view) -> hidden states [B, L, H]."""


def resolve_block_length(config: dict[str, Any], asked: int | None, default: int | None, family: str) -> int:
    """The block length of a checkpoint: config.json's `block_size`, else the one asked for, else the family's.

    Raises:
        ValueError: none of them is there, they contradict, or it is no positive whole number.
    """
    if asked is not None and asked < 1:
        raise ValueError(f"model.block_length={asked} must be at least 1, or null for the checkpoint's")
    said = keys.optional(config, "block_size", keys.whole)
    if said is not None and asked is not None and said != asked:
        raise ValueError(
            f"model.block_length={asked}, but the checkpoint's config.json says block_size={said}: it was trained on"
            " blocks of that length; leave model.block_length at null"
        )
    found = said if said is not None else asked if asked is not None else default
    if found is None:
        raise ValueError(
            f"config.json of this {family} model lacks block_size, and no length is assumed; set model.block_length to"
            f" the one it was trained with (4 for the published models), with model={family.lower()} where another"
            " option of model has no such key"
        )
    return found


def with_block_length(config: dict[str, Any], length: int, default: int | None) -> dict[str, Any]:
    """The config, which says its block length where reading it again would give another."""
    said = config.get("block_size", default)
    return config if said == length else config | {"block_size": length}


def count_blocks(ids: Tensor, attention_mask: Tensor | None, block_length: int) -> Tensor:
    """The block of each token counted from the first that exists, int64 [B, L]; -1 where there is none."""
    exists = torch.ones_like(ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    return torch.where(exists, (exists.cumsum(-1) - 1) // block_length, -1)


def causal_view(ids: Tensor, attention_mask: Tensor | None, block_length: int) -> View:
    """The inference pass: a token sees its block and those before it."""
    block = count_blocks(ids, attention_mask, block_length)
    return View(_positions(block), BlockVisibility(block, torch.zeros_like(block)))


def narrowed(
    noisy: Tensor, clean: Tensor, exists: Tensor, block: Tensor, score_mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Leave out of rows [R, L] what no scored token reads: noise in other blocks, and what follows the last of them.

    Returns:
        noisy ids, existence and blocks; rows of one clean sequence still have equal existence and blocks.
    """
    scored = _in_blocks(score_mask, block)
    last = torch.where(score_mask, block, -1).amax(1)
    place = _groups(clean, block)
    # All rows of a sequence keep what one of them needs, so that they go on sharing their clean half.
    last = last.new_full((len(last),), -1).scatter_reduce_(0, place, last, "amax")[place]
    # Where nothing is scored the first block stays, so that every parameter has a gradient (of 0).
    last = torch.maximum(last, torch.where(exists, block, block.max()).amin(1))
    # Where samples are packed into a row, a cut could hide where the next one begins.
    kept = exists & ((block <= last[:, None]) | (_samples(block) > 0).any(1, keepdim=True))
    return torch.where(scored, noisy, clean), kept, torch.where(kept, block, -1)


def denoise(
    run: Pass, noisy: Tensor, clean: Tensor, attention_mask: Tensor | None, block: Tensor | None, block_length: int
) -> Tensor:
    """Hidden states [R, L, H] of the noisy tokens, as from a pass over [noisy ; clean]; 0 where there is no token.

    Args:
        run: the family's stack.
        noisy, clean: int64 [R, L].
        attention_mask: bool [R, L].
        block: int64 [R, L], -1 where there is no token; None counts from the first token. Where the numbers fall,
            another sample begins that was packed into the row: it has positions and blocks of its own.
    """
    if block is None:
        block = count_blocks(clean, attention_mask, block_length)
    elif attention_mask is not None:
        block = torch.where(attention_mask.bool(), block, -1)
    sample = _samples(block)
    count = int(sample.max()) + 1
    apart = torch.where(sample[:, None] == torch.arange(count, device=block.device)[:, None], block[:, None], -1)
    plan = Plan.of(noisy.repeat_interleave(count, 0), clean.repeat_interleave(count, 0), apart.flatten(0, 1))
    hidden = run(plan.ids, plan.view)
    states = hidden.new_zeros(*noisy.shape, hidden.shape[-1])
    row, column = (block >= 0).nonzero(as_tuple=True)
    own = row * count + sample[row, column]
    return states.index_put((row, column), hidden[plan.line[own, column], plan.place[own, column]])


@dataclass(frozen=True)
class Plan:
    """A pass over U distinct clean sequences, each followed by those blocks of its noisy rows that differ from it.

    Attributes:
        ids: int64 [U, T].
        view: positions and visibility of the pass.
        line, place: int64 [R, L], where each row's token was read; the clean one where its block does not differ.
    """

    ids: Tensor
    view: View
    line: Tensor
    place: Tensor

    @classmethod
    def of(cls, noisy: Tensor, clean: Tensor, block: Tensor) -> Plan:
        """The least that gives the state of every token of the rows [R, L]."""
        exists = block >= 0
        changed = _in_blocks((noisy != clean) & exists, block)
        group = _groups(clean, block)
        # The clean copy is read by later noisy blocks, and where a row does not differ from it.
        last = torch.where(changed, block, -1).amax(1, keepdim=True)
        wanted = exists & (~changed | (block < last))
        lines: list[list[Tensor]] = [[] for _ in range(int(group.max()) + 1)]
        line = group[:, None].expand_as(clean)
        place = torch.zeros_like(clean)
        for number, parts in enumerate(lines):
            rows = (group == number).nonzero().flatten()
            columns = wanted[rows].any(0).nonzero().flatten()
            first = int(rows[0])
            parts.append(_columns(clean, block, first, columns, 0))
            place[rows[:, None], columns] = torch.arange(len(columns), device=clean.device)
            filled = len(columns)
            for copy, row in enumerate(rows.tolist(), 1):
                columns = changed[row].nonzero().flatten()
                parts.append(_columns(noisy, block, row, columns, copy))
                place[row, columns] = torch.arange(filled, filled + len(columns), device=clean.device)
                filled += len(columns)
        joined = [torch.cat(parts, 1).T for parts in lines]
        # Padding: token 0 of block -1 in the clean copy; nothing real sees it.
        ids, blocks, position, copy_ = (pad_sequence(joined, batch_first=True)).unbind(-1)
        lengths = torch.tensor([len(part) for part in joined], device=clean.device)
        blocks = torch.where(torch.arange(ids.shape[1], device=clean.device) < lengths[:, None], blocks, -1)
        return cls(ids, View(position, BlockVisibility(blocks, copy_)), line, place)


def _columns(ids: Tensor, block: Tensor, row: int, columns: Tensor, copy: int) -> Tensor:
    """Token, block, position and copy of these columns of a row, int64 [4, columns]."""
    position = _positions(block[row : row + 1])[0]
    stacked = [ids[row, columns], block[row, columns], position[columns], torch.full_like(columns, copy)]
    return torch.stack(stacked)


def _positions(block: Tensor) -> Tensor:
    """The place of each token among those that exist, int64 [B, L]."""
    return ((block >= 0).cumsum(-1) - 1).clamp_min(0)


def _samples(block: Tensor) -> Tensor:
    """The number of each token's sample in its row, int64 [R, L]."""
    # Missing tokens keep the block before them: they are no fall.
    known = torch.where(block >= 0, torch.arange(block.shape[1], device=block.device), 0).cummax(1).values
    filled = block.gather(1, known)
    falls = torch.zeros_like(block)
    falls[:, 1:] = (filled[:, 1:] < filled[:, :-1]).long()
    return falls.cumsum(1)


def _groups(clean: Tensor, block: Tensor) -> Tensor:
    """For each row [R, L] the number of its clean sequence among the distinct ones."""
    exists = block >= 0
    read = torch.cat([clean.masked_fill(~exists, -1), block], 1)
    return torch.unique(read, dim=0, return_inverse=True)[1]


def _in_blocks(marked: Tensor, block: Tensor) -> Tensor:
    """The tokens of those blocks that hold a marked one, bool [R, L]."""
    count = int(block.max()) + 2 if block.numel() else 1
    held = torch.zeros(len(block), count, dtype=torch.int64, device=block.device)
    held.scatter_add_(1, block + 1, (marked & (block >= 0)).long())
    return held.gather(1, block + 1) > 0
