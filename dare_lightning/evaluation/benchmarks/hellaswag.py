"""HellaSwag: which ending makes sense?"""

from __future__ import annotations

from pathlib import Path

from dare_lightning.evaluation.benchmark import Benchmark, DataFile, Description


class HellaSwag(Benchmark):
    """A beginning and four endings; a letter is the answer, or the likeliest ending in likelihood mode."""

    name = "hellaswag"
    title = "HellaSwag"
    default_config = "hellaswag/hellaswag_gen_6faab5"
    likelihood_config = "hellaswag/hellaswag_ppl_47bff9"
    files = (
        DataFile(
            "data/hellaswag/hellaswag.jsonl", "https://github.com/open-compass/opencompass (hellaswag.zip of its data)"
        ),
    )

    def adapted(self, descriptions: list[Description], folder: Path) -> list[Description]:
        """Read from the given folder."""
        return [description | {"path": str(folder / "data/hellaswag/hellaswag.jsonl")} for description in descriptions]
