"""A reward that an untrained policy gets in different amounts, for runs that must not stand still."""

from __future__ import annotations

from collections.abc import Sequence

from dare_lightning.rewards.base import Example, Verdict


class Variety:
    """The share of different characters; takes what the reward it replaces in a configuration takes."""

    def __init__(self, form: str = "") -> None:
        self.form = form

    def __call__(self, completions: Sequence[str], examples: Sequence[Example]) -> list[Verdict]:
        """One verdict a completion."""
        return [Verdict(len(set(text)) / 17, "wrong", text) for text in completions]
