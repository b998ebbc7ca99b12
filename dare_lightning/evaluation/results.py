"""What an evaluation found, with everything it depended on, in one file."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

FORMAT = 1
SUFFIX = ".eval.json"
_PACKAGES = ("dare-lightning", "opencompass", "torch", "transformers", "tokenizers", "datasets", "numpy", "math-verify")
_HASHED_PIECE = 1 << 20


@dataclass(frozen=True)
class Item:
    """One question, and what became of it.

    Attributes:
        id: part, number and repetition, equal for the same question in every evaluation of these data.
        right: by the scoring that decides the score.
        scores: by every scoring that looked at it.
        status: the verifier's status, or "right" and "wrong".
        answer: what was read out of the prediction.
        gold: the reference.
        prediction: the whole text, or the chosen label.
        prompt_sha256: of the conversation that was asked.
        tokens: length of the answer; None where answers were given.
        losses: label -> negative ELBO a token, where answers were given.
    """

    id: str
    right: bool
    scores: Mapping[str, bool]
    status: str
    answer: str | None
    gold: str
    prediction: str
    prompt_sha256: str
    tokens: int | None = None
    losses: Mapping[str, float] | None = None


@dataclass
class BenchmarkResult:
    """A benchmark of an evaluation.

    Attributes:
        status: "DONE" or "FAILED".
        reason: why it failed.
        score: percent right, the mean over the parts; None where it failed.
        parts: data set -> percent right by each scoring, and what OpenCompass reports.
        settings: how it was run.
        data: the files it read: path, bytes, sha256.
        example_prompt: the first question as it was asked.
    """

    name: str
    status: Literal["DONE", "FAILED"] = "FAILED"
    reason: str | None = None
    score: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    data: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    example_prompt: Any = None
    items: list[Item] = field(default_factory=list)

    @property
    def logged(self) -> dict[str, float]:
        """Metric name below `eval/` -> value; NaN for the score of a benchmark that failed."""
        score = math.nan if self.score is None else self.score
        return {self.name: score} | {f"{self.name}/{key}": value for key, value in self.metrics.items()}


@dataclass
class Record:
    """An evaluation: which policy, how it was asked, what it scored.

    Attributes:
        step, rollout: optimiser steps and rollouts (offline: epochs) of training before it.
        policy: fingerprint of the weights, where they came from, hash of the tokenizer.
        settings: of the evaluation as a whole.
        recipe: the composed configuration, with which it is run again; None where there was none.
    """

    step: int
    rollout: int
    policy: dict[str, Any]
    settings: dict[str, Any]
    benchmarks: dict[str, BenchmarkResult]
    recipe: dict[str, Any] | None = None
    versions: dict[str, str] = field(default_factory=lambda: versions())
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def failed(self) -> list[BenchmarkResult]:
        """The benchmarks that failed."""
        return [result for result in self.benchmarks.values() if result.status == "FAILED"]

    def save(self, file: Path) -> Path:
        """Write the record beside its place, then move it there."""
        content = {"format": FORMAT, **asdict(self)}
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(file.name + ".part")
        part.write_text(json.dumps(content, ensure_ascii=False, indent=1, default=str), encoding="utf-8")
        part.replace(file)
        return file

    @classmethod
    def load(cls, file: Path) -> Record:
        """Read what `save` wrote.

        Raises:
            ValueError: the file is something else, or of another format.
        """
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} is not a result of an evaluation: {error}") from error
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise ValueError(f"{file} is not a result of an evaluation in format {FORMAT} (a file *{SUFFIX} is)")
        benchmarks = {}
        for name, saved in content.pop("benchmarks").items():
            items = [Item(**item) for item in saved.pop("items")]
            benchmarks[name] = BenchmarkResult(items=items, **saved)
        return cls(benchmarks=benchmarks, **content)


def find_record(path: Path) -> Path:
    """A result file: the path itself, or the newest one in a folder or below it.

    Raises:
        FileNotFoundError: there is none.
    """
    if path.is_file():
        return path
    found = sorted(path.rglob(f"*{SUFFIX}"), key=lambda file: (file.stat().st_mtime_ns, file.name))
    if not found:
        raise FileNotFoundError(f"no result of an evaluation (*{SUFFIX}) at {path}")
    return found[-1]


def versions() -> dict[str, str]:
    """Versions of what a score may depend on."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def described_files(paths: Iterable[Path], folder: Path) -> list[dict[str, Any]]:
    """Name below `folder`, size and sha256 of files, and of every file in folders."""
    files = sorted({file for path in paths for file in (_inside(path) if path.is_dir() else [path])})
    return [
        {"file": str(file.relative_to(folder)), "bytes": file.stat().st_size, "sha256": sha256_of(file)}
        for file in files
    ]


def _inside(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file()]


def sha256_of(file: Path) -> str:
    """The hash of a file's content."""
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while piece := opened.read(_HASHED_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def sha256_of_json(value: Any) -> str:
    """The hash of a value as JSON, keys sorted."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False, default=str).encode()).hexdigest()


def plain(value: Any) -> Any:
    """What a result file holds of a value: tuples become lists, and what JSON cannot say becomes text."""
    return json.loads(json.dumps(value, ensure_ascii=False, default=str))


def mean_of_parts(parts: Mapping[str, Sequence[bool]]) -> float:
    """Percent right, the mean over parts of different size, as OpenCompass averages subjects."""
    shares = [100 * sum(values) / len(values) for values in parts.values() if values]
    return sum(shares) / len(shares)
