"""What a benchmark is: an OpenCompass data set, the files it reads, and who judges its answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from dare_lightning.rewards.base import Example, Reward

Mode = Literal["generate", "likelihood"]
Scoring = Literal["verifier", "opencompass"]
Description = dict[str, Any]
"""An OpenCompass data set: `type`, `path`, `reader_cfg`, `infer_cfg`, `eval_cfg`, ..."""

LoadConfig = Callable[[str], list[Description]]
"""The data sets of one of OpenCompass's configurations, by its name below `configs/datasets`."""

DATA_VARIABLE = "COMPASS_DATA_CACHE"
"""The environment variable with which OpenCompass is told where its data lie."""


@dataclass(frozen=True)
class DataFile:
    """A file or folder that a benchmark reads.

    Attributes:
        path: below the data folder, as OpenCompass lays it out: `data/gsm8k/test.jsonl`.
        source: where to get it.
    """

    path: str
    source: str


class Benchmark:
    """A benchmark's description; a subclass says what is particular, an instance how it is run.

    Args:
        config: the OpenCompass configuration its prompts come from; None takes the one that the papers use.
        decoding: arguments of the sampler for this benchmark (`max_new_tokens`, `steps`, `block_length`, ...).
        scoring: who decides what the score is. "verifier": the reward of the same name, as in training;
            "opencompass": OpenCompass's own evaluator, as in published tables. What can be had of the other is recorded
            beside it. None takes the verifier where there is one.
        mode: "generate" an answer and read it, or choose among the given answers by their "likelihood".
        limit: take the first `limit` items of each data set; None takes `eval.limit`.
        repeats: answers to each question, drawn with seeds of their own; the score is their mean.
        subsets: names of the parts to run (subjects, categories); None for all.
        published: the score that a paper gives for this policy, shown beside the measured one.

    Raises:
        ValueError: a choice that this benchmark does not offer.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    default_config: ClassVar[str]
    likelihood_config: ClassVar[str | None] = None
    files: ClassVar[tuple[DataFile, ...]] = ()
    scorings: ClassVar[tuple[Scoring, ...]] = ("opencompass",)
    separate_scorings: ClassVar[tuple[Scoring, ...]] = ()
    """Offered in another Python alone, `eval.scoring_python`, whose packages cannot be installed beside ours."""
    subset_key: ClassVar[str] = "abbr"
    """The key of a data set's description that names its part."""

    def __init__(
        self,
        decoding: Mapping[str, Any] | None = None,
        config: str | None = None,
        scoring: Scoring | None = None,
        mode: Mode = "generate",
        limit: int | None = None,
        repeats: int = 1,
        subsets: Sequence[str] | None = None,
        published: float | None = None,
    ) -> None:
        where = f"eval.benchmarks.{self.name}"
        if mode not in get_args(Mode):
            raise ValueError(f"{where}.mode={mode!r}; choose one of {', '.join(get_args(Mode))}")
        if mode == "likelihood" and not self.offers_likelihood:
            raise ValueError(f"{where}.mode=likelihood: {self.title} has no given answers to choose from; use generate")
        offered = (*self.scorings, *self.separate_scorings)
        if scoring is not None and scoring not in offered:
            raise ValueError(f"{where}.scoring={scoring!r}; {self.title} offers {', '.join(offered)}")
        for key, number in (("limit", limit), ("repeats", repeats)):
            if number is not None and number < 1:
                raise ValueError(f"{where}.{key}={number} must be at least 1")
        self.decoding = dict(decoding or {})
        self.config = config or (self.likelihood_config if mode == "likelihood" else None) or self.default_config
        self.mode: Mode = mode
        self.scoring: Scoring = "opencompass" if mode == "likelihood" else scoring or self.scorings[0]
        self.limit = limit
        self.repeats = repeats
        self.subsets = None if subsets is None else list(subsets)
        self.published = published

    @property
    def shots_in_text(self) -> int:
        """Answered examples inside the text of a question; those that are turns of their own are counted."""
        return 0

    @property
    def scores_elsewhere(self) -> bool:
        """Whether another Python, without our package, can read its data set."""
        return True

    @property
    def offers_likelihood(self) -> bool:
        """Whether answers are given, so that their likelihoods can be compared."""
        return self.likelihood_config is not None

    @property
    def settings(self) -> dict[str, Any]:
        """How it is run, for the record."""
        return {
            "config": self.config,
            "decoding": self.decoding,
            "scoring": self.scoring,
            "mode": self.mode,
            "limit": self.limit,
            "repeats": self.repeats,
            "subsets": self.subsets,
            "published": self.published,
        }

    def scorings_in_force(self, separate: bool) -> list[Scoring]:
        """Every scoring that looks at its answers, the verifier first; `separate` where there is another Python."""
        if self.mode == "likelihood":
            return ["opencompass"]
        offered = {*self.scorings, *(self.separate_scorings if separate else ())}
        return [scoring for scoring in get_args(Scoring) if scoring in offered]

    def required_files(self) -> tuple[DataFile, ...]:
        """What must be there before it can run."""
        return self.files

    def descriptions(self, load: LoadConfig, folder: Path) -> list[Description]:
        """The OpenCompass data sets to run, reading from `folder` (which holds `data/`).

        Raises:
            ValueError: `subsets` names none of them.
        """
        found = self.adapted(load(self.config), folder)
        if self.subsets is not None:
            names = [str(description.get(self.subset_key)) for description in found]
            if unknown := sorted(set(self.subsets) - set(names)):
                raise ValueError(
                    f"eval.benchmarks.{self.name}.subsets: no {', '.join(unknown)}; there are {', '.join(names)}"
                )
            found = [d for d, name in zip(found, names, strict=True) if name in self.subsets]
        return found

    def adapted(self, descriptions: list[Description], folder: Path) -> list[Description]:
        """The configuration's data sets with what this project changes in them: the path, at least."""
        raise NotImplementedError

    def verifier(self) -> Reward | None:
        """The reward that judges its answers; None where OpenCompass's evaluator is the only one."""
        return None

    def example(self, row: Mapping[str, Any], index: int) -> Example:
        """A row of the data set as the verifier reads it."""
        raise NotImplementedError

    def answer(self, prediction: str, row: Mapping[str, Any]) -> str:
        """The part of what was generated that the verifier reads; all of it by default."""
        return prediction


def data_folders(data_dir: str | None) -> list[Path]:
    """Where benchmark data are looked for: the given folder, or where OpenCompass keeps them."""
    if data_dir is not None:
        given = Path(data_dir).expanduser().resolve()
        # The folder that holds data/, or data/ itself.
        return [given, given.parent] if given.name == "data" else [given]
    cache = os.environ.get(DATA_VARIABLE)
    return [Path(cache or ".").expanduser().resolve(), Path("~/.cache/opencompass").expanduser()]


def find_data(benchmark: Benchmark, data_dir: str | None) -> Path:
    """The folder that holds every file of a benchmark.

    Raises:
        FileNotFoundError: no folder does; says which file is missing, where it comes from and where it belongs.
    """
    folders = data_folders(data_dir)
    needed = benchmark.required_files()
    for folder in folders:
        if all((folder / file.path).exists() for file in needed):
            return folder
    # The folder that lacks least is the one that was meant.
    folder = max(folders, key=lambda f: sum((f / file.path).exists() for file in needed))
    missing = [file for file in needed if not (folder / file.path).exists()]
    more = f" and {len(missing) - 1} more files" if len(missing) > 1 else ""
    searched = ", ".join(map(str, folders))
    raise FileNotFoundError(
        f"eval={benchmark.name}: no {missing[0].path}{more} in {searched}; get it from {missing[0].source} and put it"
        f" at {folder / missing[0].path}, or say with eval.data_dir=FOLDER where it lies (FOLDER holds data/)"
    )
