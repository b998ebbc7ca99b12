"""One thread a process: two test workers with two threads each spend their time waiting for each other."""

from __future__ import annotations

import os

# Before torch is imported, here and in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
