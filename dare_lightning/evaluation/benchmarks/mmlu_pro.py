"""MMLU-Pro: multiple-choice questions with up to ten answers, in 14 categories."""

from __future__ import annotations

from pathlib import Path

from dare_lightning.evaluation.benchmark import Benchmark, DataFile, Description


class MMLUPro(Benchmark):
    """A question with its options, to be reasoned about; the last line names the letter.

    `config=mmlu_pro/mmlu_pro_few_shot_gen_bfaf90` shows five answered questions first.
    """

    name = "mmlu_pro"
    title = "MMLU-Pro"
    default_config = "mmlu_pro/mmlu_pro_gen"
    files = (DataFile("data/mmlu_pro", "https://huggingface.co/datasets/TIGER-Lab/MMLU-Pro"),)
    subset_key = "category"

    def adapted(self, descriptions: list[Description], folder: Path) -> list[Description]:
        """Read from the given folder."""
        return [description | {"path": str(folder / "data/mmlu_pro")} for description in descriptions]
