"""What a data set looks like to the policy, as text for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dare_lightning.datamodules.chat import EncodedDialogue
from dare_lightning.rewards.base import Example

if TYPE_CHECKING:
    from dare_lightning.datamodules.sft import SFTDataModule

SUPERVISED = "bold green"
OPEN, CLOSE = "⟦", "⟧"
"""Put around the supervised part, so that it is seen without colours too."""
PERCENTILES = (0, 50, 90, 99, 100)


@dataclass(frozen=True)
class Shown:
    """One sample to show.

    Attributes:
        ids: its tokens.
        supervised: for each token, whether it is taught; None for a prompt that is only asked.
        title: what it is.
        ground_truth: the reference answer, where the sample is a prompt.
    """

    ids: Sequence[int]
    supervised: Sequence[bool] | None
    title: str
    ground_truth: str = ""


def shown_dialogue(encoded: EncodedDialogue, index: int) -> Shown:
    """A conversation with its supervised part."""
    cut = "" if encoded.complete else ", answer cut at max_length"
    taught = sum(encoded.supervised)
    return Shown(encoded.ids, encoded.supervised, f"row {index}: {len(encoded.ids)} tokens, {taught} supervised{cut}")


def shown_prompt(example: Example, ids: Sequence[int]) -> Shown:
    """A prompt with its reference answer."""
    return Shown(
        ids, None, f"row {example.index} of {example.source or 'the task'}: {len(ids)} tokens", example.ground_truth
    )


def preview_dialogues(data: SFTDataModule, count: int) -> RenderableType:
    """The first `count` samples of the first epoch of fine-tuning data that have been set up."""
    report = data.report
    if report is None:
        raise RuntimeError("the data are not read yet: call setup() before the preview")
    chosen = [data.train[position] for position in data.order(0)[:count]]
    return render_preview(
        data.policy.tokenizer,
        [shown_dialogue(answer, sample.index) for sample in chosen for answer in sample.answers],
        {"prompt": report.prompt_tokens, "answer": report.answer_tokens},
        report.layout,
        report.dropped,
        str(report),
    )


def preview_prompts(
    tokenizer: Any,
    prompts: Sequence[tuple[Example, Sequence[int]]],
    count: int,
    layout: str,
    dropped: Mapping[str, int],
    source: str,
) -> RenderableType:
    """The first `count` prompts of online data with their reference answers."""
    shown = [shown_prompt(example, ids) for example, ids in prompts[:count]]
    lengths = {"prompt": [len(ids) for _, ids in prompts]}
    return render_preview(tokenizer, shown, lengths, layout, dropped, source)


def render_preview(
    tokenizer: Any,
    shown: Sequence[Shown],
    lengths: Mapping[str, Sequence[int]],
    layout: str,
    dropped: Mapping[str, int],
    source: str = "",
) -> RenderableType:
    """Samples with the supervised part marked, the table of lengths, and what was dropped and why.

    Args:
        tokenizer: decodes the ids, special tokens included.
        shown: the samples.
        lengths: name ("prompt", "answer") -> tokens of every row.
        layout: the column layout found.
        dropped: reason -> rows.
        source: where the rows came from.
    """
    parts: list[RenderableType] = [sample_panel(tokenizer, sample) for sample in shown]
    parts.append(lengths_table(lengths))
    parts.append(Text(f"layout: {layout}" + (f", from {source}" if source else "")))
    if dropped:
        parts += [Text(f"dropped: {count} rows, {reason}", style="yellow") for reason, count in sorted(dropped.items())]
    else:
        parts.append(Text("dropped: none"))
    return Group(*parts)


def sample_panel(tokenizer: Any, sample: Shown) -> Panel:
    """One sample's decoded tokens in a frame."""
    text = Text(overflow="fold")
    marks = [False] * len(sample.ids) if sample.supervised is None else sample.supervised
    for taught, run in groupby(zip(sample.ids, marks, strict=True), key=lambda pair: pair[1]):
        words = tokenizer.decode([token for token, _ in run], clean_up_tokenization_spaces=False)
        text.append(f"{OPEN}{words}{CLOSE}" if taught else words, style=SUPERVISED if taught else "")
    if sample.ground_truth:
        text.append(f"\nground truth: {sample.ground_truth}", style="cyan")
    return Panel(text, title=Text(sample.title), title_align="left")


def lengths_table(lengths: Mapping[str, Sequence[int]]) -> Table:
    """Percentiles of token counts."""
    table = Table(title="tokens", title_justify="left")
    for name in ("", "rows", *("min" if p == 0 else "max" if p == 100 else f"{p} %" for p in PERCENTILES)):
        table.add_column(name, justify="right")
    for name, values in lengths.items():
        ordered = sorted(values)
        row = [str(_percentile(ordered, p)) if ordered else "-" for p in PERCENTILES]
        table.add_row(name, str(len(ordered)), *row)
    return table


def _percentile(ordered: Sequence[int], percent: int) -> int:
    """Nearest rank: the smallest value that at least `percent` per cent do not exceed."""
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]
