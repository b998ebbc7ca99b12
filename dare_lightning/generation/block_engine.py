"""The decoding loop of block-diffusion policies: one block of every row a pass, each row at its own pace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dare_lightning.families.attention import View
from dare_lightning.families.base import MAX_LOGITS, PolicyModel
from dare_lightning.families.visibility import BlockVisibility
from dare_lightning.generation.block_cache import BlockCache, distinct, gather_columns
from dare_lightning.generation.block_canvas import BlockCanvas
from dare_lightning.generation.block_steps import BlockPass, BlockSteps
from dare_lightning.generation.engine import Stats
from dare_lightning.generation.history import History
from dare_lightning.generation.sampling import RowStreams, TokenSampler, chosen_log_probs

EarlyStop = Literal["token", "block", "never"]


@dataclass(frozen=True)
class Editing:
    """Tokens of the block at work may be written again, as LLaDA2.1 does; earlier blocks and the prompt never.

    A block without masks is read again until nothing in it changes any more.

    Args:
        threshold: a proposal that differs from its token replaces it where it is more likely than this; 0 replaces
            whatever differs.
        max_post_steps: passes over a block without masks, at most.

    Raises:
        ValueError: a setting out of range.

    Source: LLaDA2.1, arXiv:2602.08676, token-to-token editing.
    """

    threshold: float = 0.9
    max_post_steps: int = 16

    def __post_init__(self) -> None:
        if not self.threshold >= 0:
            raise ValueError(
                f"editing.threshold={self.threshold} must be 0 or above; rollout.backend.editing=null is off"
            )
        if self.max_post_steps < 0:
            raise ValueError(f"editing.max_post_steps={self.max_post_steps} must be 0 or above")


@dataclass(frozen=True)
class Found:
    """Proposals for the blocks of n rows, [n, b]; they mean nothing where none was asked for.

    Attributes:
        tokens: int64.
        confidence: the probability of each, at the temperature, without filters.
        log_probs: log softmax of the policy's own logits at the tokens.
        entropy: of that distribution; None where nobody asked.
    """

    tokens: Tensor
    confidence: Tensor
    log_probs: Tensor
    entropy: Tensor | None


@dataclass
class BlockRun:
    """One batch on its way.

    Attributes:
        policy, canvas, streams: what is decoded, and with which random numbers.
        cache: keys and values of the rows at work, in their order.
        stats: what it costs.
        history: keeps every denoising pass; None where nothing is recorded.
        tick: called with the number of blocks that a pass finished.
    """

    policy: PolicyModel
    canvas: BlockCanvas
    streams: RowStreams
    cache: BlockCache
    stats: Stats
    history: History | None
    tick: Callable[[int], None] = lambda blocks: None


@dataclass(frozen=True)
class BlockDecoder:
    """Decodes block after block. A block that is final is read once more, so that later ones see its own keys.

    Where the blocks of all rows are final at the same time, that reading is part of the next blocks' first pass.

    Attributes:
        steps: which masks a pass commits.
        sampler: how tokens are drawn.
        editing: None for tokens that stay as they were written.
        early_stop: see `BlockBackend`.
        vocabulary: ids from this one on belong to no token and are never written.
    """

    steps: BlockSteps
    sampler: TokenSampler
    editing: Editing | None
    early_stop: EarlyStop
    vocabulary: int

    def run(self, run: BlockRun) -> None:
        """Decode in place."""
        canvas = run.canvas
        rows = torch.arange(len(canvas.ids), device=canvas.ids.device)
        final = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        self._read_prompts(run)
        while len(rows) > 0:
            committed = final[rows]
            if bool(committed.all()):
                hidden = self._read_with_next(run, rows)
                committed = torch.zeros_like(committed)
            else:
                hidden = self._read(run, rows)
                canvas.next_block(rows[committed])
            final[rows] = False
            at_work = rows[~committed]
            done = torch.zeros_like(committed)
            if len(at_work) > 0:
                finished, left = self._denoise(run, at_work, hidden[~committed])
                final[at_work] = finished
                done[~committed] = left
                run.tick(int(finished.sum()))
            if bool(done.any()):
                rows = rows[~done]
                run.cache.keep((~done).nonzero().flatten())

    def _read_prompts(self, run: BlockRun) -> None:
        """Fill the cache up to each row's first block; equal prompts are read once."""
        canvas, cache = run.canvas, run.cache
        starts = canvas.start.tolist()
        prompts = [tuple(ids[:start]) for ids, start in zip(canvas.ids.tolist(), starts, strict=True)]
        first, own = distinct(prompts)
        width = max(starts)
        if width == 0:
            return
        rows = torch.tensor(own, device=canvas.ids.device)
        column = torch.arange(width, device=rows.device).expand(len(rows), -1)
        exists = column < canvas.start[rows, None]
        block = torch.where(exists, column // canvas.block_length, -1)
        cache.reach(width)
        view = View(column, BlockVisibility(block, torch.zeros_like(block)), cache, rows, column)
        run.policy.hidden_states(canvas.ids[rows, :width], None, view)
        cache.copy(torch.tensor(first, device=rows.device), torch.arange(len(first), device=rows.device))
        self._count(run.stats, len(rows), width)

    def _read(self, run: BlockRun, rows: Tensor) -> Tensor:
        """Hidden states [n, b, H] of these rows' blocks, whose keys go to the cache."""
        columns = run.canvas.columns(rows)
        end = run.canvas.start[rows, None] + run.canvas.block_length
        return self._read_columns(run, rows, columns, end)

    def _read_with_next(self, run: BlockRun, rows: Tensor) -> Tensor:
        """Go to the next blocks, and read them together with the ones left: hidden states [n, b, H] of the former."""
        canvas, length = run.canvas, run.canvas.block_length
        left = canvas.columns(rows)
        canvas.next_block(rows)
        columns = torch.cat([left, canvas.columns(rows)], 1)
        end = canvas.start[rows, None] + torch.arange(2, device=rows.device).repeat_interleave(length) * length
        return self._read_columns(run, rows, columns, end)[:, length:]

    def _read_columns(self, run: BlockRun, rows: Tensor, columns: Tensor, end: Tensor) -> Tensor:
        """A pass over columns [n, q] of these rows; each sees those before its own `end`, int64 [n, q] or [n, 1]."""
        canvas, cache = run.canvas, run.cache
        cache.reach(int(end.max()))
        visible = torch.arange(cache.columns, device=rows.device) < end[..., None]
        place = torch.arange(len(rows), device=rows.device)
        view = View(columns, None if bool(visible.all()) else visible, cache, place, columns)
        self._count(run.stats, *columns.shape)
        return run.policy.hidden_states(canvas.ids[rows[:, None], columns], None, view)

    @staticmethod
    def _count(stats: Stats, rows: int, columns: int) -> None:
        stats.forwards += 1
        stats.row_forwards += rows
        stats.tokens += rows * columns

    def _denoise(self, run: BlockRun, rows: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Write what these rows' pass commits; which blocks are final now, and which rows are done, bool [n] each."""
        canvas = run.canvas
        columns = canvas.columns(rows)
        masked = canvas.masked[rows[:, None], columns]
        current = canvas.ids[rows[:, None], columns]
        wanted = masked if self.editing is None else columns >= canvas.prompt[rows, None]
        found = self._propose(run, rows, hidden, wanted)
        chosen = self.steps.select(BlockPass(masked, found.confidence, found.entropy, canvas.step[rows]))
        edited = torch.zeros_like(masked)
        if self.editing is not None:
            differs = wanted & ~masked & (found.tokens != current)
            edited = differs & (found.confidence > self.editing.threshold)
        if run.history is not None:
            self._record(run, rows, columns, torch.where(masked | edited, found.tokens, current), found, masked)
        canvas.write(rows, chosen | edited, found.tokens, found.log_probs)
        whole = ~masked.any(1)
        canvas.post[rows] += whole.long()
        full = ~canvas.masked[rows[:, None], columns].any(1)
        most = 0 if self.editing is None else self.editing.max_post_steps
        final = (whole & ~edited.any(1)) | (full & (canvas.post[rows] >= most))
        return final, self._done(run, rows, final)

    def _done(self, run: BlockRun, rows: Tensor, final: Tensor) -> Tensor:
        """bool [n]: rows that stop here, with an end token or in their last block."""
        canvas = run.canvas
        done = final & (canvas.start[rows] + canvas.block_length >= canvas.length[rows])
        if self.early_stop == "never":
            return done
        ended = canvas.ended(rows, run.policy.stop_token_ids, self.early_stop == "token")
        return done | (ended if self.early_stop == "token" and self.editing is None else ended & final)

    def _record(
        self, run: BlockRun, rows: Tensor, columns: Tensor, proposed: Tensor, found: Found, masked: Tensor
    ) -> None:
        assert run.history is not None
        canvas = run.canvas
        width = canvas.width
        states = canvas.ids[rows]
        proposals, confidence = states.clone(), torch.zeros(states.shape, device=states.device)
        proposals.scatter_(1, columns, proposed)
        confidence.scatter_(1, columns, (found.confidence * masked).float())
        start = canvas.prompt[rows]
        pad = run.policy.pad_token_id
        parts = (gather_columns(states, start, width, pad), gather_columns(proposals, start, width, pad))
        run.history.record(rows, *parts, gather_columns(confidence, start, width, 0.0))

    def _propose(self, run: BlockRun, rows: Tensor, hidden: Tensor, wanted: Tensor) -> Found:
        """Proposals at the wanted positions; no other position reaches the output head."""
        draws = run.streams.uniform(rows, wanted.shape[1])[wanted] if self.sampler.temperature > 0 else None
        states = hidden[wanted]
        size = max(1, MAX_LOGITS // run.policy.logits(states[:0]).shape[-1])
        starts = range(0, max(len(states), 1), size)
        pieces = [
            self._score(run.policy, states[s : s + size], None if draws is None else draws[s : s + size])
            for s in starts
        ]
        tokens, confidence, log_probs, entropy = (torch.cat(parts) for parts in zip(*pieces, strict=True))

        def spread(values: Tensor) -> Tensor:
            return torch.zeros(wanted.shape, dtype=values.dtype, device=values.device).masked_scatter(wanted, values)

        return Found(
            spread(tokens),
            spread(confidence),
            spread(log_probs),
            spread(entropy) if self.steps.needs_entropy else None,
        )

    def _score(
        self, policy: PolicyModel, states: Tensor, draws: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logits = policy.logits(states)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        possible = logits.clone()
        possible[:, self.vocabulary :] = -torch.inf
        possible[:, policy.mask_token_id] = -torch.inf
        tokens = self.sampler.draw(
            self.sampler.distribution(possible, policy.mask_token_id), policy.mask_token_id, draws
        )
        written = chosen_log_probs(logits, tokens)
        # What is never written keeps its share of the probability, as in the published confidence.
        scaled, sure = logits, written
        if self.sampler.temperature not in (0.0, 1.0):
            scaled = logits / self.sampler.temperature
            sure = chosen_log_probs(scaled, tokens)
        entropy = torch.zeros_like(scaled[:, 0])
        if self.steps.needs_entropy:
            log_probs = scaled.log_softmax(-1)
            entropy = -(log_probs.exp() * log_probs).sum(-1)
        return tokens, sure.exp(), written, entropy
