"""OlympiadBench: open questions of mathematics and physics olympiads, in English and Chinese."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dare_lightning.evaluation.benchmark import Benchmark, DataFile, Description
from dare_lightning.evaluation.verifiers import math_verifier
from dare_lightning.rewards.base import Example, Reward, Verdict

_PARTS = (
    "OE_TO_maths_en_COMP",
    "OE_TO_maths_zh_COMP",
    "OE_TO_maths_zh_CEE",
    "OE_TO_physics_en_COMP",
    "OE_TO_physics_zh_CEE",
)
_SOURCE = "https://github.com/OpenBMB/OlympiadBench (the text-only open-ended sets)"


class OlympiadBench(Benchmark):
    r"""A problem, answered in `\boxed{}`; five sets without pictures.

    OpenCompass's own evaluator parses LaTeX with a library that cannot be installed beside Hydra (both pin versions of
    ANTLR); it is there where `eval.scoring_python` names a Python that has OpenCompass and that library.
    """

    name = "olympiadbench"
    title = "OlympiadBench"
    default_config = "OlympiadBench/OlympiadBench_0shot_gen_be8b13"
    scorings = ("verifier",)
    separate_scorings = ("opencompass",)
    subset_key = "name"

    def required_files(self) -> tuple[DataFile, ...]:
        """The file of each set."""
        return tuple(DataFile(f"data/OlympiadBench/{part}.json", _SOURCE) for part in self.subsets or _PARTS)

    def adapted(self, descriptions: list[Description], folder: Path) -> list[Description]:
        """Read from the given folder."""
        return [description | {"path": str(folder / "data/OlympiadBench")} for description in descriptions]

    def verifier(self) -> Reward:
        """The reward of MATH, with the tolerance that some physics problems grant."""
        return _WithTolerance()

    def example(self, row: Mapping[str, Any], index: int) -> Example:
        """The reference is the first final answer; several are written with commas."""
        asked = [{"role": "user", "content": row["problem"]}]
        return Example(asked, row["solution"], {"error": row["error"]}, source=self.name, index=index)


class _WithTolerance:
    """MathReward, and numbers that differ by no more than the problem's `error`."""

    def __init__(self) -> None:
        self._exact = math_verifier()

    def __call__(self, completions: Sequence[str], examples: Sequence[Example]) -> list[Verdict]:
        verdicts = self._exact(completions, examples)
        return [
            replace(verdict, reward=1.0, status="right") if _is_close(verdict, example) else verdict
            for verdict, example in zip(verdicts, examples, strict=True)
        ]


def _is_close(verdict: Verdict, example: Example) -> bool:
    numbers = [_number(text) for text in (verdict.answer, example.ground_truth, example.extra["error"])]
    if verdict.status != "wrong" or any(number is None for number in numbers):
        return False
    found, wanted, error = (number for number in numbers if number is not None)
    return abs(found - wanted) <= error * (1 + 1e-9)


def _number(text: str | None) -> float | None:
    try:
        value = float(str(text).replace("$", "").replace(",", "").replace("{", "").replace("}", "").strip())
    except ValueError:
        return None
    return value if math.isfinite(value) else None
