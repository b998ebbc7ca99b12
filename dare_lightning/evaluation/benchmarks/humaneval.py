"""HumanEval: functions to be completed from their signature and docstring."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dare_lightning.evaluation.benchmark import Benchmark, DataFile, Description
from dare_lightning.evaluation.verifiers import code_verifier
from dare_lightning.rewards.base import Example, Reward

_FILE = "data/humaneval/human-eval-v2-20210705.jsonl"


class HumanEval(Benchmark):
    """A function to complete; right where it passes its tests, in the sandbox of the code reward.

    OpenCompass's own evaluator runs generated code in the process that trains; it is not offered.
    """

    name = "humaneval"
    title = "HumanEval"
    default_config = "humaneval/humaneval_gen_8e312c"
    files = (DataFile(_FILE, "https://github.com/openai/human-eval (data/HumanEval.jsonl.gz, unpacked)"),)
    scorings = ("verifier",)

    def adapted(self, descriptions: list[Description], folder: Path) -> list[Description]:
        """Read from the given folder."""
        return [description | {"path": str(folder / _FILE)} for description in descriptions]

    def verifier(self) -> Reward:
        """The reward of programming tasks."""
        return code_verifier()

    def example(self, row: Mapping[str, Any], index: int) -> Example:
        """The tests are the source of `check(candidate)`."""
        asked = [{"role": "user", "content": f"Complete the following python code:\n{row['prompt']}"}]
        extra = {"prompt": row["prompt"], "entry_point": row["entry_point"]}
        return Example(asked, row["test"], extra, source=self.name, index=index)
