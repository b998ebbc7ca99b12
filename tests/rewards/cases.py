"""Examples that several reward tests share."""

from __future__ import annotations

from typing import Any

import pyarrow.parquet as pq

from dare_lightning.rewards.base import Example
from tests.shared import shared_file

REASONING = "\n".join(f"Step {step}: we add the next number and keep the total." for step in range(10))


def layout(answer: str) -> str:
    """A well-formed completion without a final newline."""
    return f"<reasoning>\n{REASONING}\n</reasoning>\n<answer>\n{answer}\n</answer>"


def example(ground_truth: str = "", index: int = 0, source: str = "toy", **extra: Any) -> Example:
    return Example([{"role": "user", "content": "?"}], ground_truth, extra, source, index)


def real_rows(relative: str, step: int = 1) -> list[dict[str, Any]]:
    """Every `step`-th row of a shared parquet file; skips the test where it is missing."""
    table = pq.read_table(shared_file(relative))
    return table.take(list(range(0, table.num_rows, step))).to_pylist()


def real_examples(relative: str, step: int = 1) -> list[Example]:
    """The same rows as examples."""
    return [
        Example(row["prompt"], row["reward_model"]["ground_truth"] or "", row["extra_info"], row["data_source"], index)
        for index, row in enumerate(real_rows(relative, step))
    ]
