"""The denoising loop. What varies is plugged in: which forward, which score, which positions a pass commits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dare_lightning.families.base import MAX_LOGITS, PolicyModel
from dare_lightning.generation.canvas import Canvas, Window
from dare_lightning.generation.history import History
from dare_lightning.generation.lengths import LengthPolicy, Outcome
from dare_lightning.generation.sampling import RowStreams, Streams, TokenSampler, chosen_log_probs, without_tokens
from dare_lightning.generation.schedule import Plan, StepPolicy
from dare_lightning.generation.scores import EndScore, Score, contested, perturbed
from dare_lightning.generation.tree import Growth


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

    def hidden(self, policy: PolicyModel, canvas: Canvas, window: Window, stats: Stats) -> list[Tensor]:
        """Aligned hidden states of these rows' responses, each [n, G, H]: the conditional ones first.

        Columns outside the rows' blocks are looked at only where passes are recorded. Columns past the longest row
        may be missing.
        """
        ...

    def mix(self, logits: list[Tensor]) -> Tensor:
        """One [N, V] from the logits of each of the hidden states."""
        ...


@dataclass(frozen=True)
class FullForward:
    """Read the whole canvas; with `cfg_scale` above 0 also one whose prompt is masked, in the same call.

    Rows known to hold the same canvas (a group before its first pass, the children of one node) are read once.

    Guided logits are l_u + (cfg_scale + 1) (l_c - l_u). Source: LLaDA, arXiv:2502.09992, unsupervised guidance.
    """

    cfg_scale: float = 0.0

    def hidden(self, policy: PolicyModel, canvas: Canvas, window: Window, stats: Stats) -> list[Tensor]:
        """See `Forward.hidden`."""
        rows, shared = window.rows, None
        if (found := canvas.representatives(rows)) is not None:
            rows, shared = found
        # Where lengths vary, nothing exists behind the longest row.
        width = None if canvas.probing is None else canvas.prompt_width + int(canvas.length[rows].max())
        ids = canvas.ids[rows, :width]
        mask = None if canvas.attention_mask is None else canvas.attention_mask[rows, :width]
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
        return [states if shared is None else states[shared] for states in hidden.chunk(copies)]

    def mix(self, logits: list[Tensor]) -> Tensor:
        """See `Forward.mix`."""
        if len(logits) == 1:
            return logits[0]
        conditional, unconditional = logits
        return unconditional + (self.cfg_scale + 1) * (conditional - unconditional)


@dataclass(frozen=True)
class Proposal:
    """For every response position, [n, G]; the values mean nothing where none was asked for.

    Attributes:
        tokens: int64.
        score: how early each should be committed.
        log_probs: log softmax of the policy's own logits at the tokens.
        probability: of the token under the distribution it was drawn from; only where passes are recorded.
        ends: probability of the end-of-text token where it is the most likely one; only where lengths vary.
    """

    tokens: Tensor
    score: Tensor
    log_probs: Tensor
    probability: Tensor | None
    ends: Tensor | None


@dataclass
class Run:
    """One batch on its way.

    Attributes:
        policy, canvas, streams: what is denoised, and with which random numbers.
        stats: what it costs.
        history: keeps every pass; None where nothing is recorded.
        growth: lets the completions grow as trees; None where each has its own row from the beginning.
        tick: called after each pass.
    """

    policy: PolicyModel
    canvas: Canvas
    streams: Streams
    stats: Stats
    history: History | None
    growth: Growth | None
    tick: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Denoiser:
    """Fills a canvas, block after block. Every row goes its own way and leaves when it is finished.

    Attributes:
        forward, sampler, score, steps: the parts.
        sampled_score: scores look at what tokens are drawn from, not at the clean logits.
        order_temperature: above 0, positions are drawn from softmax(score / order_temperature), not taken in order.
        ends: another score for end-of-text proposals; None for none.
        contested: the plan by which written end-of-text tokens compete with those; None where they do not.
        lengths: decides how long each response is; None where all are as long as the canvas.
        remask: the plan by which tokens are hidden again; None where what is written stays.
        suppressed_ids: tokens that are never written besides the mask token, and that confidence does not know.
        stop_token_ids: a row also leaves when one of these is written and so is everything before it; empty for
            rows that run to their last block.
        planned_steps: steps of a whole response; 0 where none are planned.
    """

    forward: Forward
    sampler: TokenSampler
    score: Score
    steps: StepPolicy
    sampled_score: bool = False
    order_temperature: float = 0.0
    ends: EndScore | None = None
    contested: Plan | None = None
    lengths: LengthPolicy | None = None
    remask: Plan | None = None
    suppressed_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    planned_steps: int = 0

    def run(self, run: Run) -> None:
        """Denoise in place; masks are left only where every row's blocks ended with some."""
        canvas = run.canvas
        rows = torch.arange(canvas.ids.shape[0], device=canvas.ids.device)
        if run.growth is not None:
            rows = run.growth.start()
        while len(rows) > 0:
            self._skip_idle(canvas, rows)
            if run.growth is not None:
                rows = run.growth.branch(rows)
            outcome = self._pass(run, canvas.window(rows))
            canvas.advance(rows)
            if self.lengths is not None and outcome is not None:
                self.lengths.adjust(canvas, outcome, run.policy.mask_token_id, run.policy.eos_token_id)
            rows = rows[canvas.unfinished(rows)]
            if self.stop_token_ids:
                rows = rows[~canvas.answered(rows, self.stop_token_ids)]
            run.tick()
        if run.growth is not None:
            run.growth.finish()

    def _skip_idle(self, canvas: Canvas, rows: Tensor) -> None:
        """Pass over steps that would change nothing. Where tokens are hidden again, every step may change some."""
        if self.remask is not None:
            return
        masks = canvas.open(canvas.window(rows)).sum(1)
        idle = self.steps.idle(masks, canvas.place(rows))
        if idle is not None:
            canvas.step[rows] += idle

    def _pass(self, run: Run, window: Window) -> Outcome | None:
        """One forward pass of these rows, and what it commits; None where no row needs one."""
        canvas = run.canvas
        needs_order = self.score.random or self.order_temperature > 0
        order_draws = _spread(run.streams.order, canvas, window) if needs_order else None
        if self.steps.needs_random_order and order_draws is not None:
            # The draw alone decides: who commits nothing makes the step without a pass.
            busy = self.steps.select(order_draws, canvas.open(window), canvas.place(window.rows)).any(1)
            window, order_draws = window.of(busy), order_draws[busy]
            if len(window.rows) == 0:
                return None
        rows, open_ = window.rows, canvas.open(window)
        if canvas.probing is not None:
            open_ = open_ & ~canvas.probing[rows, None]
        masked, states = canvas.masked[rows], canvas.response[rows]
        token_draws = self._token_draws(run, window, open_) if self.sampler.temperature > 0 else None
        wanted = self._wanted(run, window, open_, masked)
        hidden = self.forward.hidden(run.policy, canvas, window, run.stats)
        proposal = self._propose(run, hidden, wanted, token_draws, order_draws if self.score.random else None)
        if run.history is not None:
            assert proposal.probability is not None  # asked for by the history
            run.history.record(rows, states, torch.where(masked, proposal.tokens, states), proposal.probability)
        chosen = self._commit(run, window, open_, proposal, order_draws)
        ends = torch.zeros_like(proposal.score) if proposal.ends is None else proposal.ends
        return Outcome(rows, open_, masked, chosen, proposal.score, ends)

    def _wanted(self, run: Run, window: Window, open_: Tensor, masked: Tensor) -> Tensor:
        """bool [n, G]: the positions whose logits are looked at."""
        if run.history is not None:
            return masked
        if self.lengths is None:
            return open_
        columns = torch.arange(open_.shape[1], device=open_.device)
        exists = columns < run.canvas.length[window.rows, None]
        return open_ | (exists & self.lengths.measured(run.canvas, window.rows)[:, None])

    def _commit(
        self, run: Run, window: Window, open_: Tensor, proposal: Proposal, order_draws: Tensor | None
    ) -> Tensor:
        """Choose among the open proposals, write, and hide again where that is the rule; what was written, [n, G]."""
        canvas, rows = run.canvas, window.rows
        place, score = canvas.place(rows), proposal.score
        if self.ends is not None:
            score = self.ends.adjust(score, proposal.tokens == run.policy.eos_token_id, place, self.planned_steps)
        if self.order_temperature > 0:
            assert order_draws is not None  # drawn above
            score = perturbed(score, self.order_temperature, order_draws)
        if self.remask is not None:
            left = self.remask.masks_left(place)
            canvas.commit(rows, open_, proposal.tokens, proposal.log_probs)
            canvas.hide(rows, score, open_, left, run.policy.mask_token_id)
            return open_
        if self.contested is not None:
            written = (canvas.response[rows] == run.policy.eos_token_id) & ~canvas.masked[rows]
            chosen = contested(self.contested, score, open_, written, place, window.columns())
        else:
            chosen = self.steps.select(score, open_, place)
        canvas.commit(rows, chosen, proposal.tokens, proposal.log_probs)
        return chosen

    def _token_draws(self, run: Run, window: Window, open_: Tensor) -> Tensor:
        """One uniform number for each position, float64 [n, G]; those that are only recorded disturb no other."""
        draws = _spread(run.streams.tokens, run.canvas, window)
        if run.history is None:
            return draws
        return torch.where(open_, draws, run.streams.record.uniform(window.rows, open_.shape[1]))

    def _propose(
        self, run: Run, hidden: list[Tensor], wanted: Tensor, token_draws: Tensor | None, order_draws: Tensor | None
    ) -> Proposal:
        """Tokens, scores and log-probs of the wanted positions; no other position reaches the output head."""
        row, column = wanted.nonzero(as_tuple=True)
        needed = [states[row, column] for states in hidden]
        draws = [None if d is None else d[row, column] for d in (token_draws, order_draws)]
        vocabulary = run.policy.logits(needed[0][:0]).shape[-1]
        size = max(1, MAX_LOGITS // vocabulary)
        pieces = []
        for start in range(0, max(1, len(row)), size):
            piece = slice(start, start + size)
            logits = [run.policy.logits(states[piece]) for states in needed]
            pieces.append(self._score_piece(run, logits, *[None if d is None else d[piece] for d in draws]))
        return _assembled(wanted, pieces)

    def _score_piece(
        self, run: Run, logits: list[Tensor], token_draws: Tensor | None, order_draws: Tensor | None
    ) -> Proposal:
        """The same for positions in a row, [N] each."""
        logits = [piece.to(torch.promote_types(piece.dtype, torch.float32)) for piece in logits]
        clean = without_tokens(self.forward.mix(logits), self.suppressed_ids)
        drawn_from = self.sampler.distribution(clean, run.policy.mask_token_id)
        tokens = self.sampler.draw(drawn_from, run.policy.mask_token_id, token_draws)
        # The mask token is never written, yet keeps its share of the probability, as in the published confidence.
        log_probs = chosen_log_probs(logits[0], tokens)
        scored = drawn_from if self.sampled_score else clean
        score = self.score.score(scored, tokens, order_draws, log_probs if scored is logits[0] else None)
        probability = None
        if run.history is not None:
            probability = (log_probs if drawn_from is logits[0] else chosen_log_probs(drawn_from, tokens)).exp()
        ends = None if self.lengths is None else _end_probability(clean, run.policy.eos_token_id)
        return Proposal(tokens, score, log_probs, probability, ends)


def _assembled(wanted: Tensor, pieces: Sequence[Proposal]) -> Proposal:
    """The pieces put where `wanted`, bool [n, G], is True, row by row; 0 elsewhere."""

    def column(parts: Sequence[Tensor]) -> Tensor:
        values = torch.cat(list(parts))
        return torch.zeros(wanted.shape, dtype=values.dtype, device=values.device).masked_scatter(wanted, values)

    def optional(parts: Sequence[Tensor | None]) -> Tensor | None:
        found = [part for part in parts if part is not None]
        return column(found) if found else None

    return Proposal(
        tokens=column([piece.tokens for piece in pieces]),
        score=column([piece.score for piece in pieces]),
        log_probs=column([piece.log_probs for piece in pieces]),
        probability=optional([piece.probability for piece in pieces]),
        ends=optional([piece.ends for piece in pieces]),
    )


def _end_probability(logits: Tensor, eos_token_id: int) -> Tensor:
    """The probability of this token where it is the most likely one, 0 elsewhere: float [N, V] -> [N]."""
    end = torch.full((len(logits),), eos_token_id, device=logits.device)
    return torch.where(logits.argmax(-1) == end, chosen_log_probs(logits, end).exp(), 0.0)


def _spread(streams: RowStreams, canvas: Canvas, window: Window) -> Tensor:
    """Uniform numbers put where each row's block lies, float64 [n, G].

    Each row draws as many as the longest block of all has columns, so that its stream does not depend on other rows.
    """
    columns = torch.arange(canvas.masked.shape[1], device=canvas.ids.device) - window.start[:, None]
    return streams.uniform(window.rows, canvas.widest).gather(1, columns.clamp(0, canvas.widest - 1))
