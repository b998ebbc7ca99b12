"""The verifiers that keep processes of their own: one of each for all benchmarks, so that it starts once."""

from __future__ import annotations

from functools import cache

from dare_lightning.rewards.code import CodeReward
from dare_lightning.rewards.math import MathReward


@cache
def math_verifier() -> MathReward:
    """The reward of mathematics, as training has it by default."""
    return MathReward()


@cache
def code_verifier() -> CodeReward:
    """The reward of programming tasks, as training has it by default."""
    return CodeReward()
