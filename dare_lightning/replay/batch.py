"""The columns that travel from generation through reward and advantage to the loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from dare_lightning.diffusion.blocks import BlockOrigin, block_index


@dataclass(frozen=True)
class SequenceBatch:
    """B token sequences of L columns, with whatever is known about each.

    Prompts are left-padded and completions right-padded where rows differ in length, but nothing relies on it:
    every column is described by the masks. A column that was not produced is None.

    Attributes:
        ids: int64 [B, L], the clean tokens.
        attention_mask: bool [B, L], True where a token exists.
        response_mask: bool [B, L], the tokens the policy wrote or is taught; corruption may mask these and no others.
        completion_mask: bool [B, L], the part of the response that counts in the loss (up to and including the
            first end token, by default).
        noise_seed: int64 [B], the root of every random draw made for this sample.
        sample_index: int64 [B], which row of the data set (offline) or of the rollout (online) this is.
        group_index: int64 [B], rows with the same number answer the same prompt.
        reward, advantage: float32 [B].
        solved: bool [B], whether the verifier called the answer right.
        left_out: bool [B], samples of a rollout that are not trained on, see `kept`.
        old_log_probs, ref_log_probs: float32 [B, K, N, L], row log-probs for each inner epoch K and noisy row N; N is 1
            where no two rows score the same token.
        commit_step: int64 [B, L], 0-based forward pass that wrote the token; -1 elsewhere.
        commit_log_probs: float32 [B, L], log-prob of the token when it was written, under the sampling policy.
        forward_passes: int64 [B], forward passes this row took part in; T is the most of any row.
        states: int64 [B, T, L], what each forward pass read. Where no token is ever hidden again the states follow
            from `commit_step`, and this is None.
        proposals: int64 [B, T, L], the tokens each pass proposed for the masks it read; elsewhere what it read.
        confidence: float32 [B, T, L], the probability of each proposal when it was made; 0 where there was none.
        step_rewards: float32 [B, T], the reward of each pass's proposals taken as the answer.
        step_advantage: float32 [B, T], an advantage for each forward pass instead of one for the sequence.
        token_advantage: float32 [B, L], an advantage for each token instead of one for the sequence.
        old_values, value_target: float32 [B, L], what a value model said of each token when the rollout was made, and
            what it should have said.
        node_index: int64 [B, D], for completions grown as a tree the node each belongs to at depth 1 to D; the numbers
            of one depth are those of different nodes, and the deepest is the completion's own.
        target_probs: float32 [B, T, L], for the token of each row the probability that a target distribution gives it;
            0 where the target does not ask for it.
        target_weight: float32 [B, T], what the distance of each row from its target weighs.
        block_origin: where the blocks of a block-diffusion policy were counted from when it wrote: "global", from the
            first token of the prompt, or "response", from the first one of the response.
        iteration: the inner epoch this micro-batch belongs to.
        denominator: float [D], what each part of the summed loss is divided by: a total over the whole optimiser
            step, all micro-batches and all ranks.
    """

    ids: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    completion_mask: Tensor
    noise_seed: Tensor
    sample_index: Tensor
    group_index: Tensor | None = None
    reward: Tensor | None = None
    advantage: Tensor | None = None
    solved: Tensor | None = None
    left_out: Tensor | None = None
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    commit_step: Tensor | None = None
    commit_log_probs: Tensor | None = None
    forward_passes: Tensor | None = None
    states: Tensor | None = None
    proposals: Tensor | None = None
    confidence: Tensor | None = None
    step_rewards: Tensor | None = None
    step_advantage: Tensor | None = None
    token_advantage: Tensor | None = None
    old_values: Tensor | None = None
    value_target: Tensor | None = None
    node_index: Tensor | None = None
    target_probs: Tensor | None = None
    target_weight: Tensor | None = None
    block_origin: BlockOrigin = "global"
    iteration: int = 0
    denominator: Tensor | None = None

    def __len__(self) -> int:
        return self.ids.shape[0]

    @property
    def length(self) -> int:
        """L, the number of columns."""
        return self.ids.shape[1]

    @property
    def prompt_mask(self) -> Tensor:
        """bool [B, L]: tokens that exist and were given, not written."""
        return self.attention_mask & ~self.response_mask

    def block_ids(self, block_length: int | None) -> Tensor | None:
        """The block of each token, int64 [B, L], -1 where there is none; None where there are no blocks."""
        if block_length is None:
            return None
        return block_index(self.attention_mask, self.response_mask, block_length, self.block_origin)

    def columns(self) -> Iterator[tuple[str, Tensor]]:
        """The per-row tensors that are present."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor) and field.name != "denominator":
                yield field.name, value

    def select(self, rows: Tensor | slice) -> SequenceBatch:
        """The batch of these rows, in this order."""
        chosen: dict[str, Any] = {name: value[rows] for name, value in self.columns()}
        return replace(self, **chosen)

    def kept(self) -> SequenceBatch:
        """Without the samples that are left out; where all are, the first of them, of which nothing counts."""
        if self.left_out is None or not bool(self.left_out.any()):
            return self
        if not bool(self.left_out.all()):
            return self.select(~self.left_out)
        first = self.select(slice(0, 1))
        nothing = torch.zeros_like(first.completion_mask)
        advantage = None if first.advantage is None else torch.zeros_like(first.advantage)
        return replace(first, response_mask=nothing, completion_mask=nothing, advantage=advantage)

    def filled(self, part: SequenceBatch, rows: Tensor) -> SequenceBatch:
        """This batch with the columns that only `part` has, the batch of these rows of it; 0 in the others."""
        known = {name for name, _ in self.columns()}
        found: dict[str, Any] = {}
        for name, column in part.columns():
            if name not in known:
                found[name] = column.new_zeros(len(self), *column.shape[1:])
                found[name][rows.to(column.device)] = column
        return replace(self, **found)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> SequenceBatch:
        """The same batch with every tensor on `device`."""
        moved: dict[str, Any] = {name: value.to(device, non_blocking=non_blocking) for name, value in self.columns()}
        if self.denominator is not None:
            moved["denominator"] = self.denominator.to(device, non_blocking=non_blocking)
        return replace(self, **moved)

    def trim(self) -> SequenceBatch:
        """Drop the leading and trailing columns in which no row has a token."""
        used = self.attention_mask.any(0).nonzero().flatten()
        if len(used) == 0:
            return self
        keep = slice(int(used[0]), int(used[-1]) + 1)
        kept: dict[str, Any] = {n: v[..., keep] if n in TOKEN_COLUMNS else v for n, v in self.columns()}
        return replace(self, **kept)


# Columns whose last axis is the token axis, with the value that padding takes there.
TOKEN_COLUMNS: dict[str, int | float | bool] = {
    "ids": 0,
    "attention_mask": False,
    "response_mask": False,
    "completion_mask": False,
    "old_log_probs": 0.0,
    "ref_log_probs": 0.0,
    "commit_step": -1,
    "commit_log_probs": 0.0,
    "states": 0,
    "proposals": 0,
    "confidence": 0.0,
    "target_probs": 0.0,
    "token_advantage": 0.0,
    "old_values": 0.0,
    "value_target": 0.0,
}

# Columns whose second axis counts forward passes, with the value that stands after a row's last pass.
STEP_COLUMNS: dict[str, int | float] = {
    "states": 0,
    "proposals": 0,
    "confidence": 0.0,
    "step_rewards": 0.0,
    "step_advantage": 0.0,
    "target_probs": 0.0,
    "target_weight": 0.0,
}

# Columns whose third axis counts noisy rows, of which samples may have different numbers; 0 stands after the last.
ROW_COLUMNS = ("old_log_probs", "ref_log_probs")


def concatenate(batches: Sequence[SequenceBatch]) -> SequenceBatch:
    """One batch of all rows; shorter ones are padded on the right, and after their last forward pass and noisy row.

    Raises:
        ValueError: no batch, or batches that do not hold the same columns.
    """
    if not batches:
        raise ValueError("cannot concatenate an empty list of batches")
    names = [name for name, _ in batches[0].columns()]
    if any([name for name, _ in batch.columns()] != names for batch in batches[1:]):
        raise ValueError(f"batches hold different columns; the first has {names}")
    if len({batch.block_origin for batch in batches}) > 1:
        raise ValueError("batches count their blocks from different places (block_origin)")
    length = max(batch.length for batch in batches)
    joined: dict[str, Any] = {}
    for name in names:
        parts = [getattr(batch, name) for batch in batches]
        if name in TOKEN_COLUMNS:
            parts = [_padded(p, p.ndim - 1, length, TOKEN_COLUMNS[name]) for p in parts]
        if name in STEP_COLUMNS:
            passes = max(part.shape[1] for part in parts)
            parts = [_padded(p, 1, passes, STEP_COLUMNS[name]) for p in parts]
        if name in ROW_COLUMNS:
            rows = max(part.shape[2] for part in parts)
            parts = [_padded(p, 2, rows, 0.0) for p in parts]
        joined[name] = torch.cat(parts)
    return replace(batches[0], **joined, denominator=None)


def _padded(column: Tensor, axis: int, size: int, value: int | float | bool) -> Tensor:
    missing = list(column.shape)
    missing[axis] = size - column.shape[axis]
    return torch.cat([column, column.new_full(missing, value)], axis) if missing[axis] else column
