"""MBPP: short functions from a sentence and three tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dare_lightning.evaluation.benchmark import Benchmark, DataFile, Description
from dare_lightning.evaluation.verifiers import code_verifier
from dare_lightning.rewards.base import Example, Reward

_SOURCE = "https://github.com/google-research/google-research/tree/master/mbpp"


class MBPP(Benchmark):
    """Three solved tasks, then the task; right where the function passes its tests, in the sandbox of the code reward.

    `config=mbpp/sanitized_mbpp_gen_742f0c` is the cleaned set. OpenCompass's own evaluator runs generated code in the
    process that trains; it is not offered.
    """

    name = "mbpp"
    title = "MBPP"
    default_config = "mbpp/mbpp_gen"
    scorings = ("verifier",)

    @property
    def _file(self) -> str:
        return "data/mbpp/sanitized-mbpp.jsonl" if "sanitized" in self.config else "data/mbpp/mbpp.jsonl"

    def required_files(self) -> tuple[DataFile, ...]:
        """The whole set, or the cleaned one."""
        return (DataFile(self._file, _SOURCE),)

    def adapted(self, descriptions: list[Description], folder: Path) -> list[Description]:
        """Read from the given folder."""
        return [description | {"path": str(folder / self._file)} for description in descriptions]

    def verifier(self) -> Reward:
        """The reward of programming tasks."""
        return code_verifier()

    def example(self, row: Mapping[str, Any], index: int) -> Example:
        """The tests are assertions."""
        extra = {key: row[key] for key in ("test_setup_code", "test_imports") if row.get(key)}
        tests = json.dumps([row["test_list_2"]])
        return Example([{"role": "user", "content": row["text"]}], tests, extra, source=self.name, index=index)
