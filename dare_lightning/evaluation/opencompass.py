"""Drives OpenCompass in this process: its data sets, prompts and evaluators on the live policy."""

from __future__ import annotations

import contextlib
import importlib
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dare_lightning.evaluation.adapter import Asker, live_model, to_messages, verifying_evaluator
from dare_lightning.evaluation.benchmark import Benchmark, Description, Scoring
from dare_lightning.evaluation.results import (
    BenchmarkResult,
    Item,
    described_files,
    mean_of_parts,
    plain,
    sha256_of_json,
)
from dare_lightning.evaluation.scoring import MODEL, left_by_task, score_elsewhere, score_here, task, versions_elsewhere

HINT = "benchmarks need OpenCompass: pip install 'dare-lightning[eval]'"


def require_opencompass() -> None:
    """Import OpenCompass; takes seconds, once.

    Raises:
        ImportError: it is not installed, or not usable beside what is.
    """
    try:
        importlib.import_module("opencompass.tasks")
    except ImportError as error:
        raise ImportError(f"{HINT} ({error})") from error
    # Its loggers announce every stage on the terminal.
    importlib.import_module("opencompass.utils").get_logger().setLevel(logging.WARNING)
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("opencompass.")]:
        logging.getLogger(name).setLevel(logging.WARNING)


def load_config(name: str) -> list[Description]:
    """The data sets of one of OpenCompass's own configurations, e.g. `gsm8k/gsm8k_gen`.

    Raises:
        FileNotFoundError: this version of OpenCompass has no such configuration.
    """
    import opencompass
    from mmengine.config import Config

    folder = Path(str(opencompass.__file__)).parent / "configs" / "datasets"
    file = folder / f"{name}.py"
    if not file.is_file():
        near = ", ".join(sorted(path.stem for path in file.parent.glob("*.py"))) or "none in that folder"
        raise FileNotFoundError(f"OpenCompass {opencompass.__version__} has no configuration {name}; there are {near}")
    content = Config.fromfile(str(file))
    lists = [value for key, value in content.items() if key.endswith("_datasets")]
    return [dict(description) for found in lists for description in found]


def run_benchmark(
    name: str,
    benchmark: Benchmark,
    asker_of_part: Callable[[], Asker],
    folder: Path,
    batch_size: int,
    limit: int | None,
    log: Path,
    scoring_python: str | None = None,
) -> BenchmarkResult:
    """Ask every question of a benchmark and score the answers.

    Args:
        name: as it is logged.
        asker_of_part: called for each data set of the benchmark; a fresh `Asker`.
        folder: holds `data/`.
        batch_size: questions that the policy is given at a time.
        limit: of items a data set, where the benchmark has none of its own.
        log: file that OpenCompass's own output is added to.
        scoring_python: another Python that runs OpenCompass's evaluators; None for this one.

    Raises:
        ImportError: OpenCompass is missing.
        RuntimeError: what OpenCompass reports does not fit what it says about the items.
        Exception: whatever OpenCompass, its data sets and its evaluators raise.
    """
    require_opencompass()
    started = time.perf_counter()
    result = BenchmarkResult(name, settings=settings_of(benchmark, limit, scoring_python))
    if scoring_python is not None:
        result.settings["scoring_versions"] = versions_elsewhere(scoring_python)
    result.data = described_files([folder / file.path for file in benchmark.required_files()], folder)
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        TemporaryDirectory(prefix="benchmark-") as place,
        log.open("a", encoding="utf-8") as output,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        described = [
            _prepared(benchmark, d, benchmark.limit or limit) for d in benchmark.descriptions(load_config, folder)
        ]
        parts = [_Part(benchmark, description, Path(place)) for description in described]
        for part in parts:
            part.ask(asker_of_part(), batch_size)
        for scoring in benchmark.scorings_in_force(scoring_python is not None):
            _score(parts, scoring, scoring_python)
    _collect(result, parts)
    result.seconds = result.metrics["seconds"] = round(time.perf_counter() - started, 3)
    return result


def settings_of(benchmark: Benchmark, limit: int | None, scoring_python: str | None) -> dict[str, Any]:
    """How a benchmark is run, for the record."""
    own = {"limit": benchmark.limit or limit, "scoring_python": scoring_python}
    settings: dict[str, Any] = plain(benchmark.settings | own)
    return settings


def _prepared(benchmark: Benchmark, description: Description, limit: int | None) -> Description:
    reader = dict(description["reader_cfg"])
    if limit is not None:
        reader["test_range"] = f"[0:{limit}]"
    prepared = description | {"reader_cfg": reader}
    if benchmark.repeats > 1:
        prepared["n"] = benchmark.repeats
    return prepared


def _collect(result: BenchmarkResult, parts: Sequence[_Part]) -> None:
    right: dict[str, list[bool]] = {}
    for part in parts:
        items = part.items()
        result.items += items
        result.parts[part.name] = part.report
        result.example_prompt = result.example_prompt or part.example_prompt
        right[part.name] = [item.right for item in items]
    if not result.items:
        raise ValueError(f"{result.name} has no items")
    result.settings["shots"] = max(part.shots for part in parts)
    result.score = mean_of_parts(right)
    result.metrics = _metrics(result, sum(part.asker.seconds for part in parts))
    result.status = "DONE"


def _metrics(result: BenchmarkResult, generating: float) -> dict[str, float]:
    """The score by the other scoring, and what the answers were like.

    Args:
        generating: wall-clock seconds from questions to answers, prompts' encoding included, scoring not.
    """
    metrics: dict[str, float] = {"items": float(len(result.items))}
    for name in result.items[0].scores:
        if name != result.settings["scoring"]:
            shares = [part[name] for part in result.parts.values()]
            metrics[name] = sum(shares) / len(shares)
    metrics["unparsed"] = 100 * sum(item.status == "unparsed" for item in result.items) / len(result.items)
    lengths = [item.tokens for item in result.items if item.tokens is not None]
    if lengths:
        metrics["length"] = sum(lengths) / len(lengths)
        metrics["seconds/generate"] = round(generating, 3)
        metrics["tokens_per_second"] = sum(lengths) / max(generating, 1e-9)
    return metrics


def _score(parts: Sequence[_Part], scoring: Scoring, scoring_python: str | None) -> None:
    """What one scoring says about the items of every part."""
    described = []
    for part in parts:
        description = dict(part.description)
        if scoring == "verifier":
            description["eval_cfg"] = {"evaluator": {"type": verifying_evaluator(part.benchmark)}}
        described.append(description)
    place = parts[0].place
    if scoring == "opencompass" and scoring_python is not None:
        score_elsewhere(scoring_python, described, place)
    else:
        score_here(described, place)
    for part in parts:
        part.read_scores(scoring)
    # Another scoring would find this one's results and skip its work.
    shutil.rmtree(place / "results")


class _Part:
    """One OpenCompass data set: inference on the live policy, then each scoring of its predictions."""

    def __init__(self, benchmark: Benchmark, description: Description, place: Path) -> None:
        self.benchmark = benchmark
        self.description = description
        self.name = str(description["abbr"])
        self.place = place
        self.report: dict[str, Any] = {}
        self.asker: Asker
        self.answered: list[dict[str, Any]] = []
        self.scored: dict[Scoring, list[dict[str, Any]]] = {}

    @property
    def shots(self) -> int:
        """Answered examples that a question came with."""
        retrieved = self.description["infer_cfg"]["retriever"].get("fix_id_list", ())
        return max(self.asker.shots, len(retrieved), self.benchmark.shots_in_text)

    @property
    def example_prompt(self) -> Any:
        """The first question as it was asked."""
        return to_messages(self.answered[0]["origin_prompt"]) if self.answered else None

    def ask(self, asker: Asker, batch_size: int) -> None:
        """Every question, in OpenCompass's order."""
        from opencompass.tasks import OpenICLInferTask

        self.asker = asker
        asked = self.description["infer_cfg"]
        # Else it makes a folder where the command was started, which may be forbidden.
        inferencer = {**asked["inferencer"], "output_json_filepath": str(self.place)}
        described = {**self.description, "infer_cfg": {**asked, "inferencer": inferencer}}
        infer = OpenICLInferTask(task([described], self.place, batch_size=batch_size))
        infer.run(cur_model=live_model(asker), cur_model_abbr=MODEL)
        predictions = left_by_task(self.place, "predictions", self.name)
        self.answered = [predictions[str(number)] for number in range(len(predictions))]
        if self.benchmark.mode == "generate" and len(asker.tokens) != len(self.answered):
            raise RuntimeError(
                f"{len(asker.tokens)} questions of {self.name} were asked, {len(self.answered)} are recorded"
            )

    def read_scores(self, scoring: Scoring) -> None:
        """What was just found about each item: `pred`, `answer`, `correct`, perhaps `status`."""
        result = left_by_task(self.place, "results", self.name)
        if "error" in result:
            raise RuntimeError(f"OpenCompass could not score {self.name}: {result['error']}")
        details = _details(result.pop("details", None), len(self.answered), self.benchmark.repeats)
        share = 100 * sum(detail["correct"] for detail in details) / max(len(details), 1)
        _check_agreement(result, share, self.name)
        self.report[scoring] = share
        self.report[f"{scoring}_reports"] = result
        self.scored[scoring] = details

    def items(self) -> list[Item]:
        """Every item, in the order it was asked."""
        return [self._item(number, answered) for number, answered in enumerate(self.answered)]

    def _item(self, number: int, answered: Mapping[str, Any]) -> Item:
        decisive = self.scored[self.benchmark.scoring]
        own = decisive[number]
        right = bool(own["correct"])
        judged = self.scored.get("verifier", decisive)[number]
        labels = {key[7:]: value["PPL"] for key, value in answered.items() if key.startswith("label: ")}
        prompt = answered["origin_prompt"] if labels else to_messages(answered["origin_prompt"])
        repeat, question = divmod(number, len(decisive) // self.benchmark.repeats)
        return Item(
            id=f"{self.name}/{question}" + (f".{repeat}" if self.benchmark.repeats > 1 else ""),
            right=right,
            scores={scoring: bool(found[number]["correct"]) for scoring, found in self.scored.items()},
            status=judged.get("status") or _status(judged),
            answer=None if own["pred"] is None else str(own["pred"]),
            gold=str(answered.get("gold", own["answer"])),
            prediction=str(answered["prediction"]),
            prompt_sha256=sha256_of_json(prompt),
            tokens=None if labels else self.asker.tokens[number],
            losses=labels or None,
        )


def _status(judged: Mapping[str, Any]) -> str:
    if judged["correct"]:
        return "right"
    # What OpenCompass's postprocessors return where they find no answer.
    return "unparsed" if judged["pred"] in (None, "", "NULL") else "wrong"


def _details(found: Any, count: int, repeats: int) -> list[dict[str, Any]]:
    """OpenCompass's several forms of details, as one dictionary an item in the order of the predictions."""
    if isinstance(found, Mapping):  # evaluators that give none: predictions beside references
        rows = [dict(found[str(number)]) for number in range(count)]
        flat = [
            {
                "pred": row["predictions"],
                "answer": row["references"],
                "correct": row.get("correct", row["predictions"] == row["references"]),
            }
            for row in rows
        ]
    else:  # grouped by question, each value a list with one entry a repetition
        questions: Sequence[Mapping[str, Any]] = found or []
        flat = []
        for repeat in range(repeats):
            for question in questions:
                values = {key: value[repeat] for key, value in question.items() if isinstance(value, list)}
                flat.append({"pred": None, "answer": ""} | values)
        for row in flat:
            row.setdefault("correct", row.get("is_correct"))
    if len(flat) != count or any(row["correct"] is None for row in flat):
        raise RuntimeError(f"OpenCompass scored {len(flat)} items of {count} one by one")
    return flat


def _check_agreement(result: Mapping[str, Any], share: float, name: str) -> None:
    """The items must add up to what is reported, or one of the two is misread."""
    reported = [value for key, value in result.items() if key == "accuracy" or key.startswith("accuracy (")]
    if reported and abs(float(reported[0]) - share) > 1e-6 * max(1.0, share):
        raise RuntimeError(f"OpenCompass reports {reported[0]} for {name}, its items add up to {share}")
