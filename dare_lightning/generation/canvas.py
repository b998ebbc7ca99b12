"""The state of a batch that is being denoised: prompts, masks, and who is where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dare_lightning.generation.layout import Layout
from dare_lightning.generation.schedule import Place, best_positions


def left_pad(prompts: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """ids int64 [B, P] with padding on the left, and bool [B, P], True where a token exists (from the lengths)."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[pad_token_id] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    return ids, torch.arange(width) >= width - lengths[:, None]


@dataclass(frozen=True)
class Window:
    """What n rows read in a forward pass, and which part of it they work on.

    Attributes:
        rows: int64 [n], rows of the canvas.
        start, end: int64 [n], response columns [start, end) of each row's block.
        fresh: bool [n], whether the row reads every column where keys and values are kept, see `Canvas.fresh`.
    """

    rows: Tensor
    start: Tensor
    end: Tensor
    fresh: Tensor

    def columns(self) -> list[range]:
        """The columns of each row's block."""
        return [range(start, end) for start, end in zip(self.start.tolist(), self.end.tolist(), strict=True)]

    def of(self, some: Tensor) -> Window:
        """The same of some of the rows, bool [n]."""
        return Window(self.rows[some], self.start[some], self.end[some], self.fresh[some])


@dataclass
class Canvas:
    """[prompt | response] of B rows; the response starts as masks and is cut into blocks.

    Attributes:
        ids: int64 [B, P + G].
        attention_mask: bool [B, P + G]; None where every column of every row exists.
        masked: bool [B, G], response positions still open.
        length: int64 [B], response columns that exist; what follows is padding.
        commit_step: int64 [B, G], the row's own forward pass that wrote the token; -1 where none did.
        commit_log_probs: float32 [B, G].
        forward_passes: int64 [B], passes the row has made.
        block: int64 [B], the block each row works on; stays 0 where lengths vary.
        position: int64 [B], first response column of that block.
        step: int64 [B], planned steps the row has made in that block, with those that needed no pass.
        entered: int64 [B], passes the row had made when it entered the block.
        block_masks: int64 [B], masks the block held when the row entered it.
        alike, alike_at: int64 [B], a row that holds the same canvas after the same number of passes, and that number.
        bounds, first_steps: int64 [K + 1], see `Layout`.
        pad_token_id: stands where nothing exists.
        widest: columns of the longest block a row works on.
        running: float64 [B, G], the score of each token when it was written; None where no token is hidden again.
        probing: bool [B], rows that look for their length and commit nothing; None where lengths are fixed.
        refresh_every: passes of a block after which a row is fresh again; None for once a block.
        cautious: a row whose last pass committed fewer than two tokens is fresh.
        leaves_masks: a row leaves its block after the planned steps even if masks are left.
    """

    ids: Tensor
    attention_mask: Tensor | None
    masked: Tensor
    length: Tensor
    commit_step: Tensor
    commit_log_probs: Tensor
    forward_passes: Tensor
    block: Tensor
    position: Tensor
    step: Tensor
    entered: Tensor
    block_masks: Tensor
    alike: Tensor
    alike_at: Tensor
    bounds: Tensor
    first_steps: Tensor
    pad_token_id: int
    widest: int
    running: Tensor | None = None
    probing: Tensor | None = None
    refresh_every: int | None = None
    cautious: bool = False
    leaves_masks: bool = False

    @property
    def prompt_width(self) -> int:
        """P."""
        return self.ids.shape[1] - self.masked.shape[1]

    @property
    def response(self) -> Tensor:
        """int64 [B, G], a view of `ids`."""
        return self.ids[:, self.prompt_width :]

    def window(self, rows: Tensor) -> Window:
        """The blocks these rows work on; where tokens are hidden again, everything up to the end of the block."""
        start = self.position[rows] if self.running is None else torch.zeros_like(rows)
        end = self.bounds[self.block[rows] + 1] if self.probing is None else self.position[rows] + self.widest
        end = torch.minimum(end, self.length[rows])
        return Window(rows, start, end, self.fresh(rows))

    def fresh(self, rows: Tensor) -> Tensor:
        """bool [n]: these rows' next pass must not rely on keys and values kept from earlier ones.

        It is their first in the block, it is time again, or the one before shows that they are not sure of much.
        """
        made = self.forward_passes[rows] - self.entered[rows]
        first = made == 0 if self.refresh_every is None else made % self.refresh_every == 0
        if not self.cautious:
            return first
        last = self.commit_step[rows] == self.forward_passes[rows, None] - 1
        return first | (last.sum(1) < 2)

    def open(self, window: Window) -> Tensor:
        """The masks of each row's block, bool [n, G]."""
        columns = torch.arange(self.masked.shape[1], device=self.ids.device)
        inside = (columns >= window.start[:, None]) & (columns < window.end[:, None])
        return self.masked[window.rows] & inside

    def place(self, rows: Tensor) -> Place:
        """Where these rows stand in the plan."""
        block = self.block[rows]
        first = self.first_steps[block]
        steps = self.first_steps[block + 1] - first
        return Place(self.block_masks[rows], self.step[rows], steps, first, self.fresh(rows) if self.cautious else None)

    def commit(self, rows: Tensor, chosen: Tensor, tokens: Tensor, log_probs: Tensor) -> None:
        """Write the chosen tokens after a forward pass, and count the pass.

        Args:
            rows: int64 [n].
            chosen: bool [n, G], a subset of the open positions.
            tokens, log_probs: int64 and float [n, G].
        """
        picked, column = chosen.nonzero(as_tuple=True)
        row = rows[picked]
        self.response[row, column] = tokens[picked, column]
        self.masked[row, column] = False
        self.commit_step[row, column] = self.forward_passes[row]
        self.commit_log_probs[row, column] = log_probs[picked, column].float()
        self.forward_passes[rows] += 1

    def remember_scores(self) -> None:
        """Let tokens be hidden again by the scores they had."""
        self.running = torch.zeros(self.masked.shape, dtype=torch.float64, device=self.ids.device)
        self.widest = self.masked.shape[1]

    def hide(self, rows: Tensor, scores: Tensor, chosen: Tensor, left: Tensor, mask_token_id: int) -> None:
        """Remember the scores of what was just written, then mask again the `left` tokens with the lowest of all.

        Args:
            rows: int64 [n].
            scores: float [n, G].
            chosen: bool [n, G], what was just written.
            left: int64 [n].
        """
        assert self.running is not None  # made with the canvas
        self.running[rows] = torch.where(chosen, scores.double(), self.running[rows])
        again = best_positions(-self.running[rows], ~self.masked[rows], left)
        picked, column = again.nonzero(as_tuple=True)
        row = rows[picked]
        self.response[row, column] = mask_token_id
        self.masked[row, column] = True
        self.commit_step[row, column] = -1
        self.commit_log_probs[row, column] = 0.0

    def advance(self, rows: Tensor) -> None:
        """Count a step, and move rows whose block is complete to the next block that has masks, or to the end."""
        self.step[rows] += 1
        window = self.window(rows)
        done = ~self.open(window).any(1)
        if self.leaves_masks:
            place = self.place(rows)
            done |= place.step >= place.steps
        complete, end = rows[done], window.end[done]
        while len(complete) > 0:
            self.position[complete] = end
            self.step[complete] = 0
            self.entered[complete] = self.forward_passes[complete]
            complete = complete[self.unfinished(complete)]
            if self.probing is None:
                self.block[complete] += 1
            window = self.window(complete)
            self.block_masks[complete] = self.open(window).sum(1)
            empty = self.block_masks[complete] == 0
            complete, end = complete[empty], window.end[empty]

    def unfinished(self, rows: Tensor) -> Tensor:
        """bool [n]: these rows have a block left."""
        return self.position[rows] < self.length[rows]

    def vary(self, initial: int, block_length: int, probes: bool) -> None:
        """Begin with fewer columns, and let them become more or fewer."""
        count, prompt = len(self.ids), self.prompt_width
        self.widest = block_length
        self.probing = torch.full((count,), probes and initial < self.masked.shape[1], device=self.ids.device)
        if self.attention_mask is None:
            self.attention_mask = torch.ones_like(self.ids, dtype=torch.bool)
        self.length[:] = initial
        self.masked[:, initial:] = False
        self.attention_mask[:, prompt + initial :] = False
        self.response[:, initial:] = self.pad_token_id

    def resize(self, rows: Tensor, length: Tensor, token: int, masks: bool = True) -> None:
        """Give rows int64 [n] these lengths int64 [n], at least 1 and at most G.

        New columns hold the token; `masks` says whether that is the mask token, which is still to be written over.
        """
        before, length = self.length[rows], length.clamp(1, self.masked.shape[1])
        columns = torch.arange(self.masked.shape[1], device=self.ids.device)
        exists = columns < length[:, None]
        new = exists & (columns >= before[:, None])
        masked = self.masked[rows] & exists
        self._put(rows, torch.where(new, token, self.response[rows]), masked | new if masks else masked)
        self.commit_step[rows] = self.commit_step[rows].masked_fill(~exists, -1)
        self.commit_log_probs[rows] = self.commit_log_probs[rows].masked_fill(~exists, 0.0)
        self._set_length(rows, length)

    def insert(self, rows: Tensor, column: Tensor, count: int, token: int) -> None:
        """Put `count` columns with the mask token behind one column of each row; what falls off the end is lost."""
        columns = torch.arange(self.masked.shape[1], device=self.ids.device)
        new = (columns > column[:, None]) & (columns <= column[:, None] + count)
        source = torch.where(columns > column[:, None], columns - count, columns).clamp(min=0)
        self._put(rows, self.response[rows].gather(1, source), self.masked[rows].gather(1, source))
        self._put(rows, self.response[rows].masked_fill(new, token), self.masked[rows] | new)
        self.commit_step[rows] = self.commit_step[rows].gather(1, source).masked_fill(new, -1)
        self.commit_log_probs[rows] = self.commit_log_probs[rows].gather(1, source).masked_fill(new, 0.0)
        self._set_length(rows, (self.length[rows] + count).clamp(max=self.masked.shape[1]))

    def _put(self, rows: Tensor, tokens: Tensor, masked: Tensor) -> None:
        self.response[rows] = tokens
        self.masked[rows] = masked

    def _set_length(self, rows: Tensor, length: Tensor) -> None:
        assert self.attention_mask is not None  # made by `vary`
        self.length[rows] = length
        self.position[rows] = torch.minimum(self.position[rows], length)
        exists = torch.arange(self.masked.shape[1], device=self.ids.device) < length[:, None]
        self.attention_mask[rows, self.prompt_width :] = exists
        self.response[rows] = self.response[rows].masked_fill(~exists, self.pad_token_id)

    def answered(self, rows: Tensor, stop_token_ids: tuple[int, ...]) -> Tensor:
        """bool [rows]: an end token is written and so is everything before it."""
        ends = torch.isin(self.response[rows], self.ids.new_tensor(stop_token_ids)) & ~self.masked[rows]
        return first_true(ends) < first_true(self.masked[rows])

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Make rows `target` int64 [n] hold what rows `source` int64 [n] hold, and remember that they are alike."""
        columns = [self.ids, self.masked, self.length, self.commit_step, self.commit_log_probs, self.forward_passes]
        columns += [self.block, self.position, self.step, self.entered, self.block_masks]
        columns += [column for column in (self.attention_mask, self.running) if column is not None]
        for column in columns:
            column[target] = column[source]
        self.alike[target] = source
        self.alike_at[target] = self.forward_passes[source]

    def representatives(self, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """Rows that hold all the different canvases among these, and where each row's is; None where none are alike.

        Returns:
            int64 [u] rows, and int64 [n] places among them.
        """
        other, passes = self.alike[rows], self.alike_at[rows]
        same = (self.forward_passes[rows] == passes) & (self.forward_passes[other] == passes) & (other != rows)
        if not bool(same.any()):
            return None
        return torch.where(same, other, rows).unique(return_inverse=True)

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
    layout: Layout,
    mask_token_id: int,
    pad_token_id: int,
    device: torch.device,
) -> Canvas:
    """A canvas of these prompts, left-padded to the longest, each followed by masks."""
    prompt_ids, exists = left_pad(prompts, pad_token_id)
    count, new_tokens = len(prompts), layout.new_tokens
    first_of = {tuple(prompt): row for row, prompt in reversed(list(enumerate(prompts)))}
    masks = torch.full((count, new_tokens), mask_token_id)
    attention = torch.cat([exists, torch.ones(count, new_tokens, dtype=torch.bool)], 1)
    zeros = torch.zeros(count, dtype=torch.int64, device=device)
    return Canvas(
        ids=torch.cat([prompt_ids, masks], 1).to(device),
        attention_mask=None if bool(exists.all()) else attention.to(device),
        masked=torch.ones(count, new_tokens, dtype=torch.bool, device=device),
        length=torch.full_like(zeros, new_tokens),
        commit_step=torch.full((count, new_tokens), -1, device=device),
        commit_log_probs=torch.zeros(count, new_tokens, device=device),
        forward_passes=zeros.clone(),
        block=zeros.clone(),
        position=zeros.clone(),
        step=zeros.clone(),
        entered=zeros.clone(),
        block_masks=torch.full_like(zeros, layout.bounds[1]),
        alike=torch.tensor([first_of[tuple(prompt)] for prompt in prompts], device=device),
        alike_at=zeros.clone(),
        bounds=torch.tensor(layout.bounds, device=device),
        first_steps=torch.tensor(layout.first_steps, device=device),
        pad_token_id=pad_token_id,
        widest=layout.widest,
    )
