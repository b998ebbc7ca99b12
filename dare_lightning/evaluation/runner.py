"""Runs a set of benchmarks on one policy, and keeps what each of them found or why it failed."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from dare_lightning.evaluation.adapter import Answered, Asker
from dare_lightning.evaluation.attempt import Attempt
from dare_lightning.evaluation.benchmark import Benchmark, find_data
from dare_lightning.evaluation.opencompass import HINT, run_benchmark, settings_of
from dare_lightning.evaluation.results import BenchmarkResult
from dare_lightning.evaluation.scoring import versions_elsewhere
from dare_lightning.evaluation.service import PolicyService

log = logging.getLogger(__name__)

OnError = Literal["nan", "raise"]
LIKELIHOOD = "likelihood"


class Suite:
    """Benchmarks, and how they are asked.

    Args:
        benchmarks: name -> description; names as they are logged.
        data_dir: folder that holds `data/` in OpenCompass's layout; None looks where OpenCompass does.
        limit: items of each data set, where a benchmark has no limit of its own; None for all.
        batch_size: questions handed to the sampler at a time, over all ranks.
        seed: of sampling and of likelihood noise.
        scoring_python: path of another Python, with an OpenCompass of its own, that runs OpenCompass's evaluators; None
            runs them here.

    Raises:
        ValueError: a number out of range.
    """

    def __init__(
        self,
        benchmarks: Mapping[str, Benchmark],
        data_dir: str | None = None,
        limit: int | None = None,
        batch_size: int = 64,
        seed: int = 42,
        scoring_python: str | None = None,
    ) -> None:
        for name, number in (("limit", limit), ("batch_size", batch_size)):
            if number is not None and number < 1:
                raise ValueError(f"eval.{name}={number} must be at least 1")
        self.benchmarks = dict(benchmarks)
        self.data_dir = data_dir
        self.limit = limit
        self.batch_size = batch_size
        self.seed = seed
        self.scoring_python = None if scoring_python is None else _program(scoring_python)

    @property
    def settings(self) -> dict[str, Any]:
        """How benchmarks are asked, for the record."""
        return {
            "data_dir": self.data_dir,
            "limit": self.limit,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "scoring_python": self.scoring_python,
        }

    def check(self) -> None:
        """Refuse what cannot run, before anything is trained or generated.

        Raises:
            ImportError: OpenCompass is not installed, here or where it should score.
            FileNotFoundError: a data file is missing.
            ValueError: a scoring needs another Python, and none is named.
        """
        if importlib.util.find_spec("opencompass") is None:
            raise ImportError(HINT)
        for benchmark in self.benchmarks.values():
            find_data(benchmark, self.data_dir)
            if self.scoring_python is None and benchmark.scoring not in benchmark.scorings_in_force(separate=False):
                raise ValueError(
                    f"eval.benchmarks.{benchmark.name}.scoring={benchmark.scoring} needs packages that cannot be"
                    " installed beside ours: name a Python that has them with eval.scoring_python=PATH"
                )
        if self.scoring_python is not None:
            versions_elsewhere(self.scoring_python)

    def run(self, service: PolicyService, tokenizer: Any, log_file: Path) -> dict[str, BenchmarkResult]:
        """On rank 0, inside `service.serve`: every benchmark, one after another; a failure is a result, too.

        Args:
            service: with an operation for each benchmark (its name), and `likelihood`.
            tokenizer: counts tokens.
            log_file: what OpenCompass prints goes there, and the traceback of a failure.
        """
        return {name: self._run_one(name, service, tokenizer, log_file) for name in self.benchmarks}

    def _run_one(self, name: str, service: PolicyService, tokenizer: Any, log_file: Path) -> BenchmarkResult:
        benchmark = self.benchmarks[name]

        def asker() -> Asker:
            return Asker(
                generate=lambda asked: [Answered(*answer) for answer in service.call(name, asked)],
                likelihood=lambda judged: service.call(LIKELIHOOD, judged),
                count_tokens=lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
                seed=self.seed,
            )

        started = time.perf_counter()
        with Attempt() as attempt:
            folder = find_data(benchmark, self.data_dir)
            python = self._scoring_python(benchmark)
            return run_benchmark(name, benchmark, asker, folder, self.batch_size, self.limit, log_file, python)
        log.error("benchmark %s FAILED: %s (%s has more)", name, attempt.reason, log_file)
        with Attempt(), log_file.open("a", encoding="utf-8") as file:  # the disk may be what fails
            file.write(attempt.details)
        settings = settings_of(benchmark, self.limit, self._scoring_python(benchmark))
        seconds = round(time.perf_counter() - started, 3)
        return BenchmarkResult(name, "FAILED", attempt.reason, settings=settings, seconds=seconds)

    def _scoring_python(self, benchmark: Benchmark) -> str | None:
        return self.scoring_python if benchmark.scores_elsewhere else None


def _program(path: str) -> str:
    """A program's whole path. Links are kept: a virtual environment's Python is one."""
    expanded = os.path.expanduser(path)
    return os.path.abspath(shutil.which(expanded) or expanded)


def checked_on_error(value: str) -> OnError:
    """`value`, or ValueError where it is not a known reaction to a failure."""
    if value == "nan":
        return "nan"
    if value == "raise":
        return "raise"
    raise ValueError(f"eval.on_error={value!r}; choose one of {', '.join(get_args(OnError))}")
