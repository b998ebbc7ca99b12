"""GSM8K: grade-school arithmetic in words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dare_lightning.evaluation.benchmark import Benchmark, DataFile, Description
from dare_lightning.rewards.base import Example, Reward
from dare_lightning.rewards.gsm8k import GSM8KReward

_SOURCE = "https://github.com/openai/grade-school-math (grade_school_math/data)"


class GSM8K(Benchmark):
    """Four solved examples, then the question.

    Args:
        last_number: read unmarked answers too, as the examples in the prompt are; the reward of training reads marked
            ones alone unless told otherwise.
        base: see `Benchmark`.
    """

    name = "gsm8k"
    title = "GSM8K"
    default_config = "gsm8k/gsm8k_gen"
    files = (DataFile("data/gsm8k/test.jsonl", _SOURCE), DataFile("data/gsm8k/train.jsonl", _SOURCE))
    scorings = ("verifier", "opencompass")

    def __init__(self, last_number: bool = True, **base: Any) -> None:
        super().__init__(**base)
        self.last_number = last_number

    @property
    def settings(self) -> dict[str, Any]:
        """How it is run, for the record."""
        return super().settings | {"last_number": self.last_number}

    def adapted(self, descriptions: list[Description], folder: Path) -> list[Description]:
        """Read from the given folder."""
        return [description | {"path": str(folder / "data/gsm8k")} for description in descriptions]

    def verifier(self) -> Reward:
        """The reward of GSM8K."""
        return GSM8KReward(last_number=self.last_number)

    def example(self, row: Mapping[str, Any], index: int) -> Example:
        """The reference is a worked solution that ends in `#### number`."""
        return Example([{"role": "user", "content": row["question"]}], row["answer"], source=self.name, index=index)

    def answer(self, prediction: str, row: Mapping[str, Any]) -> str:
        """Without further questions, which a policy that was shown examples may go on to make up."""
        return prediction.split("Question:")[0]
