"""The denoising loop. What varies is plugged in: which forward, which score, how many positions a pass commits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dare_lightning.families.base import PolicyModel
from dare_lightning.generation.canvas import Canvas
from dare_lightning.generation.sampling import RowStreams, Score, chosen_log_probs, sample_tokens, without_tokens
from dare_lightning.generation.schedule import StepPolicy

# Positions go through the output head in pieces of at most this many logits: 128 MB in float64.
MAX_LOGITS = 2**24


@dataclass
class Stats:
    """What a generation cost.

    Attributes:
        forwards: calls of the model.
        row_forwards: canvases read by it, over all calls; two for a row under guidance.
        tokens: columns read by it, over all calls, padding included.
    """

    forwards: int = 0
    row_forwards: int = 0
    tokens: int = 0


class Forward(Protocol):
    """How the model reads the canvas: the place for caches and for guidance."""

    def hidden(self, policy: PolicyModel, canvas: Canvas, rows: Tensor, stats: Stats) -> list[Tensor]:
        """Aligned hidden states of these rows' responses, each [rows, G, H]: the conditional ones first."""
        ...

    def mix(self, logits: list[Tensor]) -> Tensor:
        """One [N, V] from the logits of each of the hidden states."""
        ...


@dataclass(frozen=True)
class FullForward:
    """Read the whole canvas; with `cfg_scale` above 0 also one whose prompt is masked, in the same call.

    Before anything is written, rows with the same prompt (a group) hold the same canvas, which is read once.

    Guided logits are l_u + (cfg_scale + 1) (l_c - l_u). Source: LLaDA, arXiv:2502.09992, unsupervised guidance.
    """

    cfg_scale: float = 0.0

    def hidden(self, policy: PolicyModel, canvas: Canvas, rows: Tensor, stats: Stats) -> list[Tensor]:
        """See `Forward.hidden`."""
        shared: Tensor | slice = slice(None)
        if not bool(canvas.forward_passes[rows].any()):
            rows, shared = canvas.alike[rows].unique(return_inverse=True)
        ids = canvas.ids[rows]
        mask = None if canvas.attention_mask is None else canvas.attention_mask[rows]
        copies = 1
        if self.cfg_scale > 0:
            copies = 2
            unconditional = ids.clone()
            unconditional[:, : canvas.prompt_width] = policy.mask_token_id
            ids = torch.cat([ids, unconditional])
            mask = None if mask is None else torch.cat([mask, mask])
        stats.forwards += 1
        stats.row_forwards += ids.shape[0]
        stats.tokens += ids.numel()
        hidden = policy.hidden_states(ids, mask)[:, canvas.prompt_width :]
        return [states[shared] for states in hidden.chunk(copies)]

    def mix(self, logits: list[Tensor]) -> Tensor:
        """See `Forward.mix`."""
        if len(logits) == 1:
            return logits[0]
        conditional, unconditional = logits
        return unconditional + (self.cfg_scale + 1) * (conditional - unconditional)


@dataclass(frozen=True)
class Proposal:
    """For every position of the current blocks, [n, b]; the values mean nothing where the position is not open."""

    tokens: Tensor
    score: Tensor
    log_probs: Tensor


@dataclass(frozen=True)
class Denoiser:
    """Fills a canvas, block after block. Every row goes its own way and leaves when it is finished.

    Attributes:
        forward, score, steps: the parts.
        temperature: of the token draws; 0 takes the most likely token.
        suppressed_ids: tokens that are never written besides the mask token, and that confidence does not know.
        stop_token_ids: a row also leaves when one of these is written and so is everything before it; empty for
            rows that run to their last block.
    """

    forward: Forward
    score: Score
    steps: StepPolicy
    temperature: float
    suppressed_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def run(
        self,
        policy: PolicyModel,
        canvas: Canvas,
        token_streams: RowStreams,
        order_streams: RowStreams,
        stats: Stats,
        tick: Callable[[], None],
    ) -> None:
        """Denoise in place; masks are left only where every row's blocks ended with some. `tick` follows each pass."""
        rows = torch.arange(canvas.ids.shape[0], device=canvas.ids.device)
        while len(rows) > 0:
            columns = canvas.block_columns(rows)
            masked = canvas.masked[rows].gather(1, columns)
            token_draws = token_streams.uniform(rows, columns.shape[1]) if self.temperature > 0 else None
            order_draws = order_streams.uniform(rows, columns.shape[1]) if self.score.random else None
            hidden = self.forward.hidden(policy, canvas, rows, stats)
            proposal = self._propose(policy, hidden, columns, masked, token_draws, order_draws)
            chosen = self.steps.select(proposal.score, masked, canvas.block_masks[rows], canvas.step[rows])
            canvas.commit(rows, columns, chosen, proposal.tokens, proposal.log_probs)
            rows = canvas.advance(rows)
            if self.stop_token_ids:
                rows = rows[~canvas.answered(rows, self.stop_token_ids)]
            tick()

    def _propose(
        self,
        policy: PolicyModel,
        hidden: list[Tensor],
        columns: Tensor,
        masked: Tensor,
        token_draws: Tensor | None,
        order_draws: Tensor | None,
    ) -> Proposal:
        """Tokens, scores and log-probs of the open positions; no other position reaches the output head."""
        row, offset = masked.nonzero(as_tuple=True)
        needed = [states[row, columns[row, offset]] for states in hidden]
        draws = [None if d is None else d[row, offset] for d in (token_draws, order_draws)]
        vocabulary = policy.logits(needed[0][:0]).shape[-1]
        size = max(1, MAX_LOGITS // vocabulary)
        pieces = []
        for start in range(0, len(row), size):
            piece = slice(start, start + size)
            logits = [policy.logits(states[piece]) for states in needed]
            pieces.append(self._score_piece(policy, logits, *[None if d is None else d[piece] for d in draws]))
        tokens, score, log_probs = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        return Proposal(*(_scatter(masked, values) for values in (tokens, score, log_probs)))

    def _score_piece(
        self, policy: PolicyModel, logits: list[Tensor], token_draws: Tensor | None, order_draws: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = [piece.to(torch.promote_types(piece.dtype, torch.float32)) for piece in logits]
        clean = without_tokens(self.forward.mix(logits), self.suppressed_ids)
        tokens = sample_tokens(without_tokens(clean, (policy.mask_token_id,)), self.temperature, token_draws)
        # The mask token is never written, yet keeps its share of the probability, as in the published confidence.
        score = self.score.score(clean, tokens, order_draws)
        return tokens, score, chosen_log_probs(logits[0], tokens)


def _scatter(where: Tensor, values: Tensor) -> Tensor:
    """Values [N] put where True, row by row; 0 elsewhere."""
    return torch.zeros(where.shape, dtype=values.dtype, device=values.device).masked_scatter(where, values)
