"""MATH: competition mathematics, all 5000 problems or the 500 of MATH-500."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dare_lightning.evaluation.benchmark import Benchmark, DataFile, Description
from dare_lightning.evaluation.verifiers import math_verifier
from dare_lightning.rewards.base import Example, Reward

_SOURCE = "https://github.com/open-compass/opencompass (math.zip of its data)"


class MATH(Benchmark):
    r"""A problem, to be reasoned about and answered in `\boxed{}`.

    `config=math/math_prm800k_500_0shot_cot_gen_11c4b5` is MATH-500.
    """

    name = "math"
    title = "MATH"
    default_config = "math/math_0shot_gen_11c4b5"
    scorings = ("verifier", "opencompass")

    def required_files(self) -> tuple[DataFile, ...]:
        """The whole set, or the 500."""
        file = "test_prm800k_500.json" if "prm800k_500" in self.config else "math.json"
        return (DataFile(f"data/math/{file}", _SOURCE),)

    def adapted(self, descriptions: list[Description], folder: Path) -> list[Description]:
        """Read from the given folder."""
        return [description | {"path": str(folder / "data/math")} for description in descriptions]

    def verifier(self) -> Reward:
        """The reward of MATH."""
        return math_verifier()

    def example(self, row: Mapping[str, Any], index: int) -> Example:
        """The reference is the boxed part of the solution."""
        return Example([{"role": "user", "content": row["problem"]}], row["solution"], source=self.name, index=index)
