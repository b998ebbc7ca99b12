"""Any importable function as a reward."""

from __future__ import annotations

import importlib
import inspect
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

from dare_lightning.rewards.base import Example, Verdict, check_lengths, sample_name


class FunctionReward:
    """Scores with `function(completions, examples)`, which returns one number or `Verdict` for each completion.

    Args:
        path: `package.module:function`. Imported when the reward is built, so a typing error stops before training.
        solved_at: a plain number at or above this counts as "right", below as "wrong".

    Raises:
        ValueError: the path has another form.
        ImportError: the module cannot be imported or has no such function.
        TypeError: what the path names cannot be called with two arguments.
    """

    def __init__(self, path: str, solved_at: float = 1.0) -> None:
        self.path = path
        self.solved_at = solved_at
        self._function = _resolve(path)

    def __call__(self, completions: Sequence[str], examples: Sequence[Example]) -> list[Verdict]:
        """One verdict for each completion.

        Raises:
            ValueError: the function returned another number of scores, or one that is not finite.
            TypeError: it returned something that is neither a number nor a `Verdict`.
        """
        check_lengths(completions, examples)
        scores = self._function(completions, examples)
        if not isinstance(scores, Sequence) or isinstance(scores, str):
            raise TypeError(f"{self.path} returned {type(scores).__name__}; return a list, one score a completion")
        if len(scores) != len(completions):
            raise ValueError(f"{self.path} returned {len(scores)} scores for {len(completions)} completions")
        return [self._verdict(score, row, examples[row]) for row, score in enumerate(scores)]

    def _verdict(self, score: Any, row: int, example: Example) -> Verdict:
        where = f"{self.path} returned {score!r} for completion {row} ({sample_name(example)})"
        reward = score.reward if isinstance(score, Verdict) else score
        if not isinstance(reward, numbers.Real):
            raise TypeError(f"{where}; a score is a number or a Verdict")
        if not math.isfinite(reward):
            raise ValueError(f"{where}; a score must be finite")
        if isinstance(score, Verdict):
            return score
        return Verdict(float(reward), "right" if float(reward) >= self.solved_at else "wrong")


def _resolve(path: str) -> Callable[[Sequence[str], Sequence[Example]], Any]:
    module_name, separator, name = path.partition(":")
    if not (module_name and separator and name):
        raise ValueError(f"reward function path={path!r} should look like package.module:function")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ImportError(
            f"path={path!r}: cannot import {module_name} ({error}); is its folder on PYTHONPATH?"
        ) from error
    if name not in vars(module):
        public = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
        raise ImportError(f"path={path!r}: {module_name} has no {name!r}; its functions are {', '.join(public) or '-'}")
    function = vars(module)[name]
    if not callable(function):
        raise TypeError(f"path={path!r} names a {type(function).__name__}, which cannot be called")
    try:
        inspect.signature(function).bind([], [])
    except TypeError as error:
        raise TypeError(f"path={path!r}: {name} must take (completions, examples) ({error})") from error
    return function
