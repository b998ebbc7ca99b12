"""AIME 2025: thirty problems whose answers are integers from 0 to 999."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dare_lightning.evaluation.benchmark import Benchmark, DataFile, Description, LoadConfig
from dare_lightning.evaluation.verifiers import math_verifier
from dare_lightning.rewards.base import Example, Reward

_SOURCE = "https://huggingface.co/datasets/opencompass/AIME2025 (both .jsonl files, one after the other)"


class AIME25(Benchmark):
    r"""A problem, answered in `\boxed{}`; asked several times because thirty problems are few.

    OpenCompass has this set with a language model as the judge only; here its prompt for AIME 2024 and the rules that
    judge that one are used, as DARE does.
    """

    name = "aime25"
    title = "AIME 2025"
    default_config = "aime2024/aime2024_gen_6e39a4"
    files = (DataFile("data/aime2025/aime2025.jsonl", _SOURCE),)
    scorings = ("verifier", "opencompass")

    def descriptions(self, load: LoadConfig, folder: Path) -> list[Description]:
        """The prompt and the rules of AIME 2024 on the problems of 2025."""
        from opencompass.datasets import CustomDataset

        (base,) = load(self.config)
        path = str(folder / "data/aime2025/aime2025.jsonl")
        return [base | {"abbr": "aime2025", "type": CustomDataset, "path": path}]

    def verifier(self) -> Reward:
        """The reward of MATH."""
        return math_verifier()

    def example(self, row: Mapping[str, Any], index: int) -> Example:
        """The reference is the integer."""
        return Example(
            [{"role": "user", "content": row["question"]}], str(row["answer"]), source=self.name, index=index
        )
