"""Code of other people, whose failure must not end a training run."""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import Self


class Attempt:
    """Context that keeps the error of its body instead of passing it on.

    Benchmarks run foreign code on foreign data, and what that raises cannot be listed; the caller decides what a
    failure means. Interrupts and exits pass through.

    Attributes:
        error: what went wrong; None where nothing did.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    @property
    def reason(self) -> str | None:
        """One line about what went wrong, None where nothing did."""
        if self.error is None:
            return None
        text = " ".join(str(self.error).split()) or "no message"
        return f"{type(self.error).__name__}: {text}"

    @property
    def details(self) -> str:
        """The traceback, "" where nothing went wrong."""
        return "" if self.error is None else "".join(traceback.format_exception(self.error))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, Exception):
            self.error = error
            return True
        return False
