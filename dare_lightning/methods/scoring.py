"""Noisy rows of a batch under a policy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from dare_lightning.diffusion.diagnostics import EntropySum
from dare_lightning.diffusion.rows import Rows
from dare_lightning.families.base import PolicyModel, token_log_probs
from dare_lightning.replay.batch import SequenceBatch


def score_rows(
    policy: PolicyModel,
    rows: Rows,
    batch: SequenceBatch,
    taught: Tensor | None,
    temperature: float,
    entropy: EntropySum | None = None,
) -> Tensor:
    """log-probs of the scored positions of every row, float [B, N, L]; 0 elsewhere.

    Args:
        taught: bool [B], the samples that are run; None for all. The others get 0.
        temperature: divides the logits.
        entropy: takes the entropy of each distribution.
    """
    score_mask = rows.score_mask if taught is None else rows.score_mask & taught.view(-1, 1, 1)
    flat = flat_rows(policy, rows, batch, score_mask)
    scored = token_log_probs(
        policy,
        flat.noisy_ids,
        flat.clean_ids,
        flat.attention_mask,
        flat.score_mask,
        None if rows.target_ids is None else rows.target_ids.flatten(0, 1),
        temperature,
        flat.block_ids,
        entropy,
    )
    return scored.view(rows.noisy_ids.shape)


class FlatRows(NamedTuple):
    """Every noisy row as a sequence of its own, [B * N, L] each; what `scored_states` reads after the policy."""

    noisy_ids: Tensor
    clean_ids: Tensor
    attention_mask: Tensor
    score_mask: Tensor
    block_ids: Tensor | None


def flat_rows(policy: PolicyModel, rows: Rows, batch: SequenceBatch, score_mask: Tensor) -> FlatRows:
    """The rows [B, N, L] behind each other, with their sample's columns repeated; `score_mask` bool [B, N, L]."""
    blocks = batch.block_ids(policy.block_length)

    def repeated(column: Tensor) -> Tensor:
        return column[:, None].expand(-1, rows.count, -1).flatten(0, 1)

    return FlatRows(
        rows.noisy_ids.flatten(0, 1),
        repeated(batch.ids),
        repeated(batch.attention_mask),
        score_mask.flatten(0, 1),
        None if blocks is None else repeated(blocks),
    )


def join_rows(parts: Iterable[Tensor], merge: bool) -> Tensor:
    """Row log-probs [B, n, L] of consecutive rows as those of all rows.

    Args:
        merge: no two rows score the same token, so that one row holds all: [B, 1, L], however many rows there are.
    """
    if not merge:
        return torch.cat(list(parts), dim=1)
    total: Tensor | None = None
    for part in parts:
        merged = part.sum(1, keepdim=True)
        total = merged if total is None else total + merged
    assert total is not None  # there is a row
    return total


def stored_rows(stored: Tensor, rows: Rows, part: slice, merged: bool) -> Tensor:
    """The row log-probs [B, n, L] of these rows, which are a part of all, from what `join_rows` made.

    Args:
        stored: float [B, N, L], or [B, 1, L] of merged rows.
        merged: as for `join_rows`; all rows are taken as well.
    """
    if merged and stored.shape[1] == 1:
        return torch.where(rows.score_mask, stored, 0.0)
    return stored[:, part]
