"""Completions for people and for programs: coloured by denoising order, or as JSON records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.color import Color
from rich.style import Style
from rich.text import Text

from dare_lightning.replay.batch import SequenceBatch

# Early to late: blue, green, yellow, red; told apart by brightness too.
GRADIENT = ((70, 110, 220), (60, 190, 170), (230, 205, 80), (235, 110, 70))
UNDECODED = "\N{REPLACEMENT CHARACTER}"


def step_style(step: int, last_step: int) -> Style:
    """Colour of a token by the forward pass that wrote it, from 0 (blue) to `last_step` (red); -1 is dim."""
    if step < 0:
        return Style(dim=True)
    place = (step / last_step if last_step > 0 else 0.0) * (len(GRADIENT) - 1)
    left = min(int(place), len(GRADIENT) - 2)
    share = place - left
    rgb = (round(a + (b - a) * share) for a, b in zip(GRADIENT[left], GRADIENT[left + 1], strict=True))
    return Style(color=Color.from_rgb(*rgb))


def render_denoising(tokenizer: Any, batch: SequenceBatch, row: int) -> Text:
    """The completion of one row, each token in the colour of the forward pass that wrote it.

    The answer (`completion_mask`) is shown, not what follows its end. Characters made of several tokens take the
    colour of the last of them. The last line is a legend.

    Raises:
        ValueError: the batch has no commit steps.
    """
    ids, steps = _completion(batch, row)
    last = max(steps, default=-1)
    text = Text()
    for piece, step in _pieces(tokenizer, ids, steps):
        text.append(piece, step_style(step, last))
    text.append("\n")
    if last < 0:
        return text.append("no token was written by a forward pass", Style(dim=True))
    text.append("forward pass ", Style(dim=True))
    marks = sorted({round(last * part / 4) for part in range(5)})
    for mark in marks:
        text.append(f"{mark} ", step_style(mark, last))
    if min(steps) < 0:
        text.append("filled without one", step_style(-1, last))
    return text


def as_json(tokenizer: Any, batch: SequenceBatch, row: int, settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """One row as plain values for `json.dumps`.

    Keys: prompt, completion (text without special tokens), prompt_ids, completion_ids (up to and including the first
    end token, unless the end-of-text policy keeps the rest), commit_steps, log_probs, forward_passes, seed, settings.

    Raises:
        ValueError: the batch has no commit steps.
    """
    ids, steps = _completion(batch, row)
    prompt_ids = batch.ids[row][batch.prompt_mask[row]].tolist()
    log_probs, passes = batch.commit_log_probs, batch.forward_passes
    return {
        "prompt": _decode(tokenizer, prompt_ids),
        "completion": _decode(tokenizer, ids, skip_special_tokens=True),
        "prompt_ids": prompt_ids,
        "completion_ids": ids,
        "commit_steps": steps,
        "log_probs": None if log_probs is None else log_probs[row][batch.completion_mask[row]].tolist(),
        "forward_passes": None if passes is None else int(passes[row]),
        "seed": int(batch.noise_seed[row]),
        "settings": dict(settings or {}),
    }


def _completion(batch: SequenceBatch, row: int) -> tuple[list[int], list[int]]:
    if batch.commit_step is None:
        raise ValueError("the batch has no commit_step: only a backend that reports commit steps can be shown by step")
    counts = batch.completion_mask[row]
    return batch.ids[row][counts].tolist(), batch.commit_step[row][counts].tolist()


def _pieces(tokenizer: Any, ids: Sequence[int], steps: Sequence[int]) -> list[tuple[str, int]]:
    """Text and step of the tokens; tokens that only together make a character are joined."""
    pieces: list[tuple[str, int]] = []
    pending: list[int] = []
    latest = -1
    for token, step in zip(ids, steps, strict=True):
        pending.append(token)
        latest = max(latest, step)
        text = _decode(tokenizer, pending)
        # Four bytes make any UTF-8 character: what does not decode by then never will.
        if text.endswith(UNDECODED) and len(pending) < 4:
            continue
        pieces.append((text, latest))
        pending, latest = [], -1
    if pending:
        pieces.append((_decode(tokenizer, pending), latest))
    return pieces


def _decode(tokenizer: Any, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
