"""One thread a process, and no configuration file parsed twice.

Two test workers with two threads each would spend their time waiting for each other.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

# Before torch is imported, here and in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import omegaconf.omegaconf as reader
import pytest
import yaml

_parsed: dict[str, Any] = {}


class _ParsedOnce:
    """`yaml` as OmegaConf reads files with it: hundreds of tests compose, which is parsing for a good part."""

    @staticmethod
    def load(stream: Any, Loader: Any) -> Any:
        text = stream if isinstance(stream, str) else stream.read()
        if text not in _parsed:
            _parsed[text] = yaml.load(text, Loader=Loader)
        return copy.deepcopy(_parsed[text])

    def __getattr__(self, name: str) -> Any:
        return getattr(yaml, name)


@pytest.fixture(scope="session", autouse=True)
def _files_are_parsed_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "yaml", _ParsedOnce())
        yield
