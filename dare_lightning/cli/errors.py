"""The one error that means: the command line or the configuration is wrong, nothing was started."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class UserError(Exception):
    """A mistake the user can correct; shown without a traceback, exit status 2.

    Args:
        problems: one line each, saying what was found and what would be right.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems: Sequence[str] = problems


@contextmanager
def before_the_start() -> Iterator[None]:
    """Here what is refused or missing is the user's to correct: nothing was started."""
    try:
        yield
    except (ValueError, FileNotFoundError, ImportError) as error:
        raise UserError(str(error)) from error
