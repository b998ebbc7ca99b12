"""A process that is afterwards what it was before, although libraries changed it."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def untouched_process() -> Iterator[None]:
    """Put back the SIGALRM handler and timer, `sys.path`, the environment, the folder, warning filters and log levels.

    Importing OpenCompass installs a handler, extends the path and sets variables; its data sets and evaluators use
    timers. Imported modules stay imported. Random states are the business of the caller.
    """
    # Only the main thread may look at signals.
    signals = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGALRM) if signals else None
    timer = signal.getitimer(signal.ITIMER_REAL) if signals else (0.0, 0.0)
    path, environment, folder = list(sys.path), dict(os.environ), os.getcwd()
    filters, root = list(warnings.filters), logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        if signals:
            signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
            signal.setitimer(signal.ITIMER_REAL, *timer)
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        warnings.filters[:] = filters  # type: ignore[index]
        root.setLevel(level)
        root.handlers[:] = handlers
