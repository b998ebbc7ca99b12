"""Closest names for something misspelt."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(name: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """The candidates most like `name`, best first, none where nothing is similar.

    Dotted names are compared as a whole and by their last part, so that `lr` finds `method.optimizer.lr`.
    """
    known = list(dict.fromkeys(candidates))
    leaf = name.rsplit(".", 1)[-1]
    scores: dict[str, float] = {}
    for candidate in known:
        whole = difflib.SequenceMatcher(None, name.lower(), candidate.lower()).ratio()
        last = difflib.SequenceMatcher(None, leaf.lower(), candidate.rsplit(".", 1)[-1].lower()).ratio()
        scores[candidate] = whole if whole >= 0.6 else last * 0.85 if last >= 0.9 else 0.0
    ranked = sorted((c for c in known if scores[c] > 0), key=lambda c: -scores[c])
    return [c for c in ranked if scores[c] >= 0.75 * scores[ranked[0]]][:count]


def hint(name: str, candidates: Iterable[str], limit: int = 12) -> str:
    """ "closest: a, b", or the whole list where nothing is similar and the list is short."""
    known = sorted(dict.fromkeys(candidates))
    near = closest(name, known)
    if near:
        return f"closest: {', '.join(near)}"
    if not known:
        return "there is none"
    shown = ", ".join(known[:limit])
    return f"there are: {shown}" + (f" and {len(known) - limit} more" if len(known) > limit else "")
