"""GPQA: questions of biology, physics and chemistry that cannot be looked up."""

from __future__ import annotations

from pathlib import Path

from dare_lightning.evaluation.benchmark import Benchmark, DataFile, Description


class GPQA(Benchmark):
    """A question of the diamond set and four answers; the letter is the answer.

    DARE shows five answered questions first, in a configuration that OpenCompass does not ship; this is its
    zero-shot one.
    """

    name = "gpqa"
    title = "GPQA"
    default_config = "gpqa/gpqa_gen_4baadb"
    files = (
        DataFile(
            "data/gpqa/gpqa_diamond.csv", "https://huggingface.co/datasets/Idavidrein/gpqa (after asking for access)"
        ),
    )

    def adapted(self, descriptions: list[Description], folder: Path) -> list[Description]:
        """Read from the given folder."""
        return [description | {"path": str(folder / "data/gpqa")} for description in descriptions]
