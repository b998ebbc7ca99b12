"""Two results of one benchmark, question by question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dare_lightning.evaluation.results import BenchmarkResult, mean_of_parts

RESAMPLES = 10_000


@dataclass(frozen=True)
class Comparison:
    """How the second result differs from the first, on the questions that both answered.

    Attributes:
        items: questions compared.
        first, second: percent right, mean over the parts.
        interval: of the difference; 95 % by the paired bootstrap over questions, whose repetitions stay together.
        to_right, to_wrong: ids of the items that flipped.
        notes: what else differs and so may explain it.
    """

    items: int
    first: float
    second: float
    interval: tuple[float, float]
    to_right: list[str]
    to_wrong: list[str]
    notes: list[str] = field(default_factory=list)

    @property
    def difference(self) -> float:
        """Second minus first, in points of percent."""
        return self.second - self.first


def compare(first: BenchmarkResult, second: BenchmarkResult, seed: int = 0) -> Comparison | str:
    """Pair the items of two results by id; a sentence where they cannot be compared.

    Questions are paired only where both were asked in the same words.
    """
    for which, result in (("a", first), ("b", second)):
        if result.status == "FAILED":
            return f"FAILED in {which}: {result.reason}"
    known = {item.id: item for item in first.items}
    pairs = [(known[item.id], item) for item in second.items if item.id in known]
    same = [(a, b) for a, b in pairs if a.prompt_sha256 == b.prompt_sha256]
    if not pairs:
        return "no item is in both: their parts, limits or repeats differ"
    if not same:
        return "no question was asked in both in the same words"
    parts: dict[str, list[tuple[bool, bool]]] = {}
    questions: dict[str, dict[str, list[int]]] = {}
    for a, b in same:
        part, _, number = a.id.rpartition("/")
        parts.setdefault(part, []).append((a.right, b.right))
        # Answers to one question are no independent draws; 8 of them must not narrow the interval like 8 questions.
        questions.setdefault(part, {}).setdefault(number.partition(".")[0], []).append(int(b.right) - int(a.right))
    differences = [[sum(q) / len(q) for q in part.values()] for part in questions.values()]
    return Comparison(
        items=len(same),
        first=mean_of_parts({name: [a for a, _ in values] for name, values in parts.items()}),
        second=mean_of_parts({name: [b for _, b in values] for name, values in parts.items()}),
        interval=paired_interval(differences, seed),
        to_right=[a.id for a, b in same if b.right and not a.right],
        to_wrong=[a.id for a, b in same if a.right and not b.right],
        notes=_notes(first, second, len(pairs) - len(same)),
    )


def paired_interval(differences: Sequence[Sequence[float]], seed: int, level: float = 0.95) -> tuple[float, float]:
    """Percentile interval of the mean over parts of the mean difference, in points of percent.

    The questions of each part are drawn with replacement, as many as there are; the draw depends on `seed` alone.

    Args:
        differences: for each part the questions' differences, each in [-1, 1].

    Source: the paired bootstrap test (Efron and Tibshirani 1993, chapter 13), stratified by part.
    """
    rng = np.random.default_rng(seed)
    means = np.zeros(RESAMPLES)
    for values in differences:
        # Only how often each value is drawn matters.
        kinds, counts = np.unique(np.asarray(values, dtype=np.float64), return_counts=True)
        drawn = rng.multinomial(len(values), counts / len(values), size=RESAMPLES)
        means += drawn @ kinds / len(values)
    tail = (1 - level) / 2
    low, high = np.quantile(100 * means / len(differences), [tail, 1 - tail])
    return float(low), float(high)


def _notes(first: BenchmarkResult, second: BenchmarkResult, reworded: int) -> list[str]:
    a, b = _flat(first.settings), _flat(second.settings)
    notes = [f"{key} differs: {a.get(key)} and {b.get(key)}" for key in sorted({*a, *b}) if a.get(key) != b.get(key)]
    hashes = [{file["file"]: file["sha256"] for file in result.data} for result in (first, second)]
    changed = sorted(name for name in hashes[0].keys() & hashes[1].keys() if hashes[0][name] != hashes[1][name])
    notes += [f"data file {name} differs" for name in changed]
    if reworded:
        notes.append(f"{reworded} questions were asked in other words and are left out")
    return notes


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings inside of settings under dotted names, so that what differs can be named alone."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return flat
