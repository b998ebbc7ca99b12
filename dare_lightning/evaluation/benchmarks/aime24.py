"""AIME 2024: thirty problems whose answers are integers from 0 to 999."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dare_lightning.evaluation.benchmark import Benchmark, DataFile, Description
from dare_lightning.evaluation.verifiers import math_verifier
from dare_lightning.rewards.base import Example, Reward


class AIME24(Benchmark):
    r"""A problem, answered in `\boxed{}`; asked several times because thirty problems are few."""

    name = "aime24"
    title = "AIME 2024"
    default_config = "aime2024/aime2024_gen_6e39a4"
    files = (DataFile("data/aime.jsonl", "https://github.com/open-compass/opencompass (aime.zip of its data)"),)
    scorings = ("verifier", "opencompass")

    def adapted(self, descriptions: list[Description], folder: Path) -> list[Description]:
        """Read from the given folder."""
        return [description | {"path": str(folder / "data/aime.jsonl")} for description in descriptions]

    def verifier(self) -> Reward:
        """The reward of MATH."""
        return math_verifier()

    def example(self, row: Mapping[str, Any], index: int) -> Example:
        """The reference is the integer."""
        return Example(
            [{"role": "user", "content": row["question"]}], str(row["answer"]), source=self.name, index=index
        )
