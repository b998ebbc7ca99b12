"""Where every row of a block-diffusion decoding stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dare_lightning.diffusion.blocks import BlockOrigin
from dare_lightning.generation.block_cache import gather_columns, scatter_columns
from dare_lightning.generation.canvas import first_true
from dare_lightning.generation.completion import Responses
from dare_lightning.generation.history import History


@dataclass
class BlockCanvas:
    """[prompt | response] of B rows without padding on the left; the response is masks up to the end of its last block.

    Attributes:
        ids: int64 [B, W].
        masked: bool [B, W], response positions still open.
        prompt: int64 [B], tokens of each prompt.
        start: int64 [B], first column of the block each row works on.
        length: int64 [B], columns of each row: the end of its last block.
        commit_step: int64 [B, W], the row's denoising pass that wrote the token last; -1 where none did.
        commit_log_probs: float32 [B, W].
        forward_passes: int64 [B], denoising passes the row has made.
        step: int64 [B], those in this block.
        post: int64 [B], those in this block that read no mask.
        block_length: b.
        width: columns of the responses that are handed over, at least those of the longest.
    """

    ids: Tensor
    masked: Tensor
    prompt: Tensor
    start: Tensor
    length: Tensor
    commit_step: Tensor
    commit_log_probs: Tensor
    forward_passes: Tensor
    step: Tensor
    post: Tensor
    block_length: int
    width: int

    def columns(self, rows: Tensor) -> Tensor:
        """The columns of these rows' blocks, int64 [n, b]."""
        return self.start[rows, None] + torch.arange(self.block_length, device=self.ids.device)

    def write(self, rows: Tensor, where: Tensor, tokens: Tensor, log_probs: Tensor) -> None:
        """Put tokens [n, b] into these rows' blocks where True, after a denoising pass of theirs, and count it."""
        columns = self.columns(rows)
        scatter_columns(self.ids, rows, columns, where, tokens)
        scatter_columns(self.masked, rows, columns, where, torch.zeros_like(where))
        scatter_columns(self.commit_log_probs, rows, columns, where, log_probs)
        passes = self.forward_passes[rows, None].expand_as(columns)
        scatter_columns(self.commit_step, rows, columns, where, passes)
        self.forward_passes[rows] += 1
        self.step[rows] += 1

    def next_block(self, rows: Tensor) -> None:
        """These rows go on to their next block."""
        self.start[rows] += self.block_length
        self.step[rows] = 0
        self.post[rows] = 0

    def ended(self, rows: Tensor, stop_token_ids: Sequence[int], everything_before: bool) -> Tensor:
        """bool [n]: the response of these rows holds an end token, and no mask before it where that is asked for."""
        stops = torch.isin(self.ids[rows], self.ids.new_tensor(list(stop_token_ids)))
        inside = torch.arange(self.ids.shape[1], device=self.ids.device) >= self.prompt[rows, None]
        first = first_true(stops & inside & ~self.masked[rows])
        if everything_before:
            return first < first_true(self.masked[rows])
        return first < self.ids.shape[1]

    def responses(self, eos_token_id: int, history: History | None) -> Responses:
        """What the rows wrote up to the end of the block they are in; masks left there become end tokens."""
        self.ids[self.masked] = eos_token_id
        end = torch.minimum(self.start + self.block_length, self.length) - self.prompt

        def response(column: Tensor, filler: int | float) -> Tensor:
            return gather_columns(column, self.prompt, self.width, filler).cpu()

        return Responses(
            tokens=response(self.ids, eos_token_id),
            commit_step=response(self.commit_step, -1),
            commit_log_probs=response(self.commit_log_probs, 0.0),
            forward_passes=self.forward_passes.cpu(),
            length=end.cpu(),
            trajectory=None if history is None else history.trajectory(len(self.ids), self.width),
        )


def block_canvas(
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    block_length: int,
    origin: BlockOrigin,
    mask_token_id: int,
    device: torch.device,
    width: int,
) -> BlockCanvas:
    """Prompts followed by masks for `new_tokens` tokens and for what completes the last block.

    Under "global" blocks are counted from the prompt's first token, so that the first block decoded may begin with the
    end of the prompt; under "response" from the first token of the response.
    """
    prompt = torch.tensor([len(p) for p in prompts])
    start = prompt.clone() if origin == "response" else prompt // block_length * block_length
    blocks = (prompt + new_tokens - start + block_length - 1) // block_length
    length = start + blocks * block_length
    columns = int(length.max())
    ids = torch.full((len(prompts), columns), mask_token_id)
    for row, tokens in enumerate(prompts):
        ids[row, : len(tokens)] = torch.tensor(list(tokens))
    column = torch.arange(columns)
    masked = (column >= prompt[:, None]) & (column < length[:, None])
    zeros = torch.zeros(len(prompts), dtype=torch.int64, device=device)
    return BlockCanvas(
        ids=ids.to(device),
        masked=masked.to(device),
        prompt=prompt.to(device),
        start=start.to(device),
        length=length.to(device),
        commit_step=torch.full(ids.shape, -1, device=device),
        commit_log_probs=torch.zeros(ids.shape, device=device),
        forward_passes=zeros.clone(),
        step=zeros.clone(),
        post=zeros.clone(),
        block_length=block_length,
        width=width,
    )
