"""ARC-Challenge: science questions of school exams."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from dare_lightning.evaluation.benchmark import Benchmark, DataFile, Description

_FILES = {
    "dev": "data/ARC/ARC-c/ARC-Challenge-Dev.jsonl",
    "test": "data/ARC/ARC-c/ARC-Challenge-Test.jsonl",
}
_SOURCE = "https://allenai.org/data/arc (ARC-Challenge)"


class ARCChallenge(Benchmark):
    """A question and four answers; a letter is the answer, or the likeliest answer in likelihood mode.

    Args:
        split: "dev", the 295 questions that OpenCompass and the published tables made with it read, or "test", 1172.
        base: see `Benchmark`.
    """

    name = "arc_c"
    title = "ARC-Challenge"
    default_config = "ARC_c/ARC_c_gen"
    likelihood_config = "ARC_c/ARC_c_ppl_a450bd"

    def __init__(self, split: Literal["dev", "test"] = "dev", **base: Any) -> None:
        super().__init__(**base)
        if split not in _FILES:
            raise ValueError(f"eval.benchmarks.{self.name}.split={split!r}; choose one of {', '.join(_FILES)}")
        self.split = split

    @property
    def settings(self) -> dict[str, Any]:
        """How it is run, for the record."""
        return super().settings | {"split": self.split}

    def required_files(self) -> tuple[DataFile, ...]:
        """The file of the split."""
        return (DataFile(_FILES[self.split], _SOURCE),)

    def adapted(self, descriptions: list[Description], folder: Path) -> list[Description]:
        """Read the split from the given folder."""
        return [description | {"path": str(folder / _FILES[self.split])} for description in descriptions]
