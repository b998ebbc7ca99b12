"""Where reference data lies, and how tests that need it are skipped when it is not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


def _folder(variable: str, default: str) -> Path:
    return (ROOT / os.environ.get(variable, default)).resolve()


SHARED = _folder("DARE_SHARED_DIR", "../shared")
GOLDEN = _folder("DARE_GOLDEN_DIR", "../shared/golden")
FIXTURES = _folder("DARE_FIXTURES_DIR", "../shared/fixtures")


def golden_files(pattern: str) -> list[Any]:
    """Every golden file matching the pattern, as pytest parameters; one skipped parameter where there is none."""
    found = sorted(GOLDEN.glob(pattern))
    if not found:
        reason = f"no {pattern} under {GOLDEN} (set DARE_GOLDEN_DIR)"
        return [pytest.param(None, marks=pytest.mark.skip(reason=reason), id="missing")]
    return [pytest.param(path, id=path.stem) for path in found]


def fixture_model(name: str) -> Path:
    """The tiny checkpoint of this name; skips the test where it is missing."""
    return _require(FIXTURES / "models" / name, "DARE_FIXTURES_DIR")


def shared_file(relative: str) -> Path:
    """A file or folder of the shared data; skips the test where it is missing."""
    return _require(SHARED / relative, "DARE_SHARED_DIR")


def _require(path: Path, variable: str) -> Path:
    if not path.exists():
        pytest.skip(f"{path} is not there (set {variable})")
    return path
