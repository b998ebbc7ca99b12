"""Command lines as real processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import processes
from tests.processes import Finished


@pytest.fixture
def environment() -> dict[str, str]:
    """The environment of a process that runs the checkout from any folder."""
    return processes.environment(COLUMNS="100")


@pytest.fixture
def dare(tmp_path: Path, environment: dict[str, str]) -> Callable[..., Finished]:
    """Runs `python -m dare_lightning` in an empty folder; `module=` names another program.

    With options for Python it is a new interpreter, in which nothing is imported yet.
    """

    def run(*words: str, module: str = "dare_lightning", python: tuple[str, ...] = ()) -> Finished:
        if not python:
            return processes.run(module, *words, cwd=tmp_path, env=environment, timeout=120)
        command = [sys.executable, *python, "-m", module, *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)

    return run


@pytest.fixture
def tiny(dare: Callable[..., Finished], tmp_path: Path) -> Callable[..., Finished]:
    """The same program with a `fit` that ends in a moment, and a folder that looks like a model."""

    def run(*words: str) -> Finished:
        (tmp_path / "config.json").write_text("{}")
        fixed = () if "--rerun-failed" in words else (f"model.path={tmp_path}", "logger=none")
        return dare("fit", *words, *fixed, module="tests.cli.program")

    return run
