"""The one error that means: the command line or the configuration is wrong, nothing was started."""

from __future__ import annotations

from collections.abc import Sequence


class UserError(Exception):
    """A mistake the user can correct; shown without a traceback, exit status 2.

    Args:
        problems: one line each, saying what was found and what would be right.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems: Sequence[str] = problems
