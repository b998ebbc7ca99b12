"""One thread a process, no configuration file parsed twice, the longest files first, and a small garbage collection.

Two test workers with two threads each would spend their time waiting for each other.
"""

from __future__ import annotations

import gc
import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

# Before torch is imported, here and in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hydra._internal import defaults_list
from omegaconf import OmegaConf

# Most seconds first, so that no worker ends the run alone with one of them.
LONGEST = (
    *("methods/test_matrix.py", "rewards/test_math.py", "rewards/test_sandbox.py", "cli/test_sweep.py"),
    *("cli/test_command_line.py", "cli/test_kill.py", "equalities/test_first_update.py", "callbacks/test_tracking.py"),
    *("equalities/test_two_ranks.py", "test_documents.py", "test_house.py", "methods/test_matrix_invariance.py"),
    *("callbacks/test_tracking_process.py", "callbacks/test_rollout_checkpoint.py", "equalities/test_resume.py"),
    *("generation/test_block_golden.py", "test_benchmarks.py", "cli/test_conf.py", "cli/test_commands.py"),
    *("generation/test_builtin_golden.py", "cli/test_run_folder.py", "equalities/test_splitting.py"),
)

# Everything that is imported until all tests are known stays: nothing of it is garbage.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # pytest-xdist would start the files of many tests first


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {str(Path(__file__).parent / name): number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(str(item.path), len(place)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _files_are_parsed_once() -> Iterator[None]:
    """Hundreds of tests compose, which is reading the same files for half of the time."""
    read, write_down, known = OmegaConf.load, defaults_list._create_interpolation_map, {}

    def load(file: str | Path | IO[Any]) -> Any:
        text = Path(file).read_text(encoding="utf-8") if isinstance(file, str | Path) else file.read()
        if text not in known:
            known[text] = pickle.dumps(read(io.StringIO(text)))
        return pickle.loads(known[text])

    def choices(overrides: Any, defaults: list[Any], self_added: bool) -> Any:
        """Hydra writes down for each file what was chosen so far, and looks there for `${}` in its defaults alone."""
        return write_down(overrides, defaults, self_added) if "$" in repr(defaults) else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmegaConf, "load", staticmethod(load))
        patch.setattr(defaults_list, "_create_interpolation_map", choices)
        yield
