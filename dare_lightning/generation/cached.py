"""Approximate reading of the canvas: keys and values of most columns are kept from a block's first pass."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from dare_lightning.families.attention import KeyValueCache, View
from dare_lightning.families.base import PolicyModel
from dare_lightning.generation.canvas import Canvas, Window
from dare_lightning.generation.engine import Stats
from dare_lightning.generation.layout import Layout
from dare_lightning.generation.schedule import Place, StepPolicy

CacheKind = Literal["prefix", "dual"]
CACHE_KINDS: tuple[str, ...] = get_args(CacheKind)


@dataclass
class CachedForward:
    """Read the whole canvas when a row is fresh; after that only a part, with keys and values kept from then.

    A row is fresh when it enters a block, and when `Canvas.fresh` says so.

    "prefix" reads the block and everything after it; "dual" reads the block alone, so that what follows keeps the
    keys and values it had when the block was all masks. What a pass reads it also writes. Both approximate: tokens
    that are not read do not notice what the block writes. Where a block takes one pass nothing is approximated.

    One object serves one batch of rows.

    Args:
        kind: what is kept.
        reads_left_context: read what the family needs on the left of a piece as well (see `PolicyModel.left_context`);
            False leaves the first state of the piece as it comes, as published code for Dream does.

    Source: Fast-dLLM, arXiv:2505.22618, prefix cache and DualCache.
    """

    kind: CacheKind
    reads_left_context: bool = True
    _cache: KeyValueCache | None = field(default=None, init=False, repr=False)

    def hidden(self, policy: PolicyModel, canvas: Canvas, window: Window, stats: Stats) -> list[Tensor]:
        """See `Forward.hidden`; columns that were not read are 0."""
        if self._cache is None:
            self._cache = KeyValueCache(*canvas.ids.shape)
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        if bool(window.fresh.any()):
            found.append(self._whole(policy, canvas, window, window.fresh.nonzero().flatten(), stats))
        for places in self._pieces(window, (~window.fresh).nonzero().flatten()):
            found.append(self._piece(policy, canvas, window, places, stats))
        width = found[0][2].shape[-1]
        states = found[0][2].new_zeros(len(window.rows), canvas.masked.shape[1], width)
        for places, columns, hidden in found:
            states[places[:, None], columns] = hidden
        return [states]

    def mix(self, logits: list[Tensor]) -> Tensor:
        """See `Forward.mix`."""
        return logits[0]

    def _whole(
        self, policy: PolicyModel, canvas: Canvas, window: Window, places: Tensor, stats: Stats
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A pass over all columns of the rows at these places of the window."""
        assert self._cache is not None
        rows = window.rows[places]
        alike = canvas.representatives(rows)
        read, shared = (rows, None) if alike is None else alike
        columns = torch.arange(canvas.ids.shape[1], device=rows.device).expand(len(read), -1)
        hidden = self._read(policy, canvas, read, columns, stats)[:, canvas.prompt_width :]
        if shared is not None:
            hidden = hidden[shared]
            self._cache.copy(read[shared], rows)
        written = torch.arange(hidden.shape[1], device=rows.device).expand(len(rows), -1)
        return places, written, hidden

    def _pieces(self, window: Window, later: Tensor) -> list[Tensor]:
        """The places of the window that read a piece, those of one width together."""
        size = (window.end - window.start if self.kind == "dual" else -window.start)[later]
        return [later[size == value] for value in size.unique()]

    def _piece(
        self, policy: PolicyModel, canvas: Canvas, window: Window, places: Tensor, stats: Stats
    ) -> tuple[Tensor, Tensor, Tensor]:
        start = window.start[places]
        end = int(window.end[places[0]]) if self.kind == "dual" else canvas.masked.shape[1]
        size = end - int(start[0])
        left = policy.left_context if self.reads_left_context else 0
        offsets = torch.arange(-left, size, device=start.device)
        columns = canvas.prompt_width + start[:, None] + offsets
        hidden = self._read(policy, canvas, window.rows[places], columns, stats)[:, left:]
        return places, start[:, None] + offsets[left:], hidden

    def _read(self, policy: PolicyModel, canvas: Canvas, rows: Tensor, columns: Tensor, stats: Stats) -> Tensor:
        if canvas.attention_mask is None:
            positions, visible = columns, None
        else:
            exists = canvas.attention_mask[rows]
            positions = (exists.cumsum(1) - 1).clamp_min(0).gather(1, columns)
            visible = exists[:, None]
        stats.forwards += 1
        stats.row_forwards += len(rows)
        stats.tokens += columns.numel()
        view = View(positions, visible, self._cache, rows, columns)
        return policy.hidden_states(canvas.ids[rows].gather(1, columns), view=view)


@dataclass(frozen=True)
class Wrapped:
    """A step policy that leaves some passes to another one.

    Args:
        inner: the other one.
    """

    inner: StepPolicy

    @property
    def planned(self) -> bool:
        """See `StepPolicy.planned`."""
        return self.inner.planned

    @property
    def compares_probabilities(self) -> bool:
        """See `StepPolicy.compares_probabilities`."""
        return self.inner.compares_probabilities

    @property
    def needs_random_order(self) -> bool:
        """See `StepPolicy.needs_random_order`."""
        return self.inner.needs_random_order

    def layout(self, new_tokens: int, block_length: int | None, steps: int | None) -> Layout:
        """See `StepPolicy.layout`."""
        return self.inner.layout(new_tokens, block_length, steps)

    def idle(self, masks: Tensor, place: Place) -> Tensor | None:
        """See `StepPolicy.idle`."""
        return self.inner.idle(masks, place)


class FirstColumnFirst(Wrapped):
    """A block's first pass commits its first column alone; then the inner policy goes on.

    Published cached decoding of Dream does this, because the state that predicts the first column lies before the
    block and later passes do not read it.
    """

    def idle(self, masks: Tensor, place: Place) -> Tensor | None:
        """See `StepPolicy.idle`; the first pass of a block always commits something."""
        found = self.inner.idle(masks, place)
        return None if found is None else torch.where(place.step == 0, 0, found)

    def select(self, score: Tensor, open_: Tensor, place: Place) -> Tensor:
        """See `StepPolicy.select`."""
        first = open_ & (open_.cumsum(1) == 1)
        begun = replace(place, block_masks=place.block_masks - 1)
        return torch.where((place.step == 0)[:, None], first, self.inner.select(score, open_, begun))


@dataclass(frozen=True)
class SureOfStale(Wrapped):
    """A pass that relies on kept keys and values commits what it is sure of, and nothing where it is sure of nothing.

    Needs a canvas that is `cautious`: a row whose pass committed fewer than two tokens is fresh in the next one, where
    the inner policy commits at least one. What a policy is unsure of in stale keys and values is often wrong, wherever
    it works in its prompt's states while it writes; what it is sure of seldom is.

    Args:
        sure: the least score, a probability, at which a stale pass commits.
    """

    sure: float

    def select(self, score: Tensor, open_: Tensor, place: Place) -> Tensor:
        """See `StepPolicy.select`."""
        assert place.fresh is not None  # a cautious canvas says so
        return torch.where(place.fresh[:, None], self.inner.select(score, open_, place), open_ & (score >= self.sure))


def check_sure(sure: float | None, kind: str | None, refresh_every: int | None, steps: StepPolicy) -> None:
    """Refuse a `cache_sure` that means nothing.

    Raises:
        ValueError: out of range, without a cache that is ever relied on, or with a schedule that does not commit by
            what it is sure of.
    """
    if sure is None:
        return
    if not 0 <= sure <= 1:
        raise ValueError(f"cache_sure={sure} must lie in [0, 1]: it is compared with probabilities")
    if kind is None:
        raise ValueError(f"cache_sure={sure} says what a cached pass may commit; set cache to prefix or dual")
    if refresh_every == 1:
        raise ValueError(f"cache_sure={sure} has no say where cache_refresh=1 reads everything in every pass; drop one")
    if steps.planned or not steps.compares_probabilities:
        raise ValueError(
            f"cache_sure={sure} needs a schedule that commits by confidence in as many passes as it takes; use"
            " ConfidenceThreshold or ConfidenceFactor"
        )


def check_cache(kind: str | None, refresh_every: int | None, settings: dict[str, Any]) -> None:
    """Refuse settings that a cache cannot serve.

    Args:
        kind: "prefix", "dual", or None for no cache.
        refresh_every: see `Canvas.refresh_every`.
        settings: name -> value of what needs every column in every pass; a value that is set is refused.

    Raises:
        ValueError: no such cache, one of the settings is on, or passes are counted without a cache.
    """
    if kind is None:
        if refresh_every is not None:
            raise ValueError(
                f"cache_refresh={refresh_every} says when a cache is filled anew; set cache to prefix or dual"
            )
        return
    if refresh_every is not None and refresh_every < 1:
        raise ValueError(f"cache_refresh={refresh_every} must be at least 1 pass, or null for once a block")
    if kind not in CACHE_KINDS:
        raise ValueError(f"cache={kind!r} is not one of {', '.join(CACHE_KINDS)}; null reads everything in every pass")
    for name, value in settings.items():
        if value:
            raise ValueError(f"cache={kind} cannot serve {name}={value}, which needs every column in every pass")
