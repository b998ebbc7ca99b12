"""The state of a batch that is being denoised: prompts, masks, and who is where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def left_pad(prompts: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """ids int64 [B, P] with padding on the left, and bool [B, P], True where a token exists (from the lengths)."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[pad_token_id] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    return ids, torch.arange(width) >= width - lengths[:, None]


@dataclass
class Canvas:
    """[prompt | response] of B rows; the response starts as masks and is cut into blocks of equal length.

    Attributes:
        ids: int64 [B, P + G].
        attention_mask: bool [B, P + G]; None where no row is padded.
        masked: bool [B, G], response positions still open.
        commit_step: int64 [B, G], the row's own forward pass that wrote the token; -1 where none did.
        commit_log_probs: float32 [B, G].
        forward_passes: int64 [B], passes the row has made.
        block: int64 [B], the block each row works on.
        step: int64 [B], passes the row has made in that block.
        block_masks: int64 [B], masks the block held when the row entered it.
        alike: int64 [B], the first row with the same prompt; before their first pass such rows hold the same canvas.
        block_length: G must be a multiple of it.
    """

    ids: Tensor
    attention_mask: Tensor | None
    masked: Tensor
    commit_step: Tensor
    commit_log_probs: Tensor
    forward_passes: Tensor
    block: Tensor
    step: Tensor
    block_masks: Tensor
    alike: Tensor
    block_length: int

    @property
    def prompt_width(self) -> int:
        """P."""
        return self.ids.shape[1] - self.masked.shape[1]

    @property
    def response(self) -> Tensor:
        """int64 [B, G], a view of `ids`."""
        return self.ids[:, self.prompt_width :]

    def block_columns(self, rows: Tensor) -> Tensor:
        """Response columns of these rows' current blocks, int64 [rows, block_length]."""
        offsets = torch.arange(self.block_length, device=self.ids.device)
        return self.block[rows][:, None] * self.block_length + offsets

    def commit(self, rows: Tensor, columns: Tensor, chosen: Tensor, tokens: Tensor, log_probs: Tensor) -> None:
        """Write the chosen tokens after a forward pass, and count the pass.

        Args:
            rows: int64 [n].
            columns: int64 [n, b], response columns.
            chosen: bool [n, b], a subset of the open positions.
            tokens, log_probs: int64 and float [n, b].
        """
        picked, offset = chosen.nonzero(as_tuple=True)
        row, column = rows[picked], columns[picked, offset]
        self.response[row, column] = tokens[picked, offset]
        self.masked[row, column] = False
        self.commit_step[row, column] = self.forward_passes[row]
        self.commit_log_probs[row, column] = log_probs[picked, offset].float()
        self.forward_passes[rows] += 1

    def advance(self, rows: Tensor) -> Tensor:
        """Move rows whose block is complete to their next block; returns the rows that have one left."""
        self.step[rows] += 1
        complete = rows[~self.masked[rows].gather(1, self.block_columns(rows)).any(1)]
        self.block[complete] += 1
        self.step[complete] = 0
        left = rows[self.block[rows] * self.block_length < self.masked.shape[1]]
        entered = left[self.step[left] == 0]
        self.block_masks[entered] = self.masked[entered].gather(1, self.block_columns(entered)).sum(1)
        return left

    def answered(self, rows: Tensor, stop_token_ids: tuple[int, ...]) -> Tensor:
        """bool [rows]: an end token is written and so is everything before it."""
        ends = torch.isin(self.response[rows], self.ids.new_tensor(stop_token_ids)) & ~self.masked[rows]
        return first_true(ends) < first_true(self.masked[rows])

    def fill(self, token: int) -> None:
        """Write `token` over every mask that is left; no forward pass wrote it, so `commit_step` stays -1."""
        self.response[self.masked] = token
        self.masked[:] = False


def first_true(flags: Tensor) -> Tensor:
    """Column of the first True of each row, int64 [B]; the number of columns where there is none."""
    found = flags.any(1)
    return torch.where(found, flags.int().argmax(1), flags.shape[1])


def masked_canvas(
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    block_length: int,
    mask_token_id: int,
    pad_token_id: int,
    device: torch.device,
) -> Canvas:
    """A canvas of these prompts, left-padded to the longest, each followed by `new_tokens` masks."""
    prompt_ids, exists = left_pad(prompts, pad_token_id)
    count = len(prompts)
    first_of = {tuple(prompt): row for row, prompt in reversed(list(enumerate(prompts)))}
    masks = torch.full((count, new_tokens), mask_token_id)
    attention = torch.cat([exists, torch.ones(count, new_tokens, dtype=torch.bool)], 1)
    zeros = torch.zeros(count, dtype=torch.int64, device=device)
    return Canvas(
        ids=torch.cat([prompt_ids, masks], 1).to(device),
        attention_mask=None if bool(exists.all()) else attention.to(device),
        masked=torch.ones(count, new_tokens, dtype=torch.bool, device=device),
        commit_step=torch.full((count, new_tokens), -1, device=device),
        commit_log_probs=torch.zeros(count, new_tokens, device=device),
        forward_passes=zeros.clone(),
        block=zeros.clone(),
        step=zeros.clone(),
        block_masks=torch.full_like(zeros, block_length),
        alike=torch.tensor([first_of[tuple(prompt)] for prompt in prompts], device=device),
        block_length=block_length,
    )
