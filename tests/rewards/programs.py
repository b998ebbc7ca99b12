"""What the tests of generated programs share."""

from __future__ import annotations

import json
from typing import Any

from dare_lightning.rewards.code import CodeReward
from tests.rewards.cases import example

TEST = json.dumps(["assert f(2) == 4"])


def make(level: Any = "auto", **settings: Any) -> CodeReward:
    """A reward with a long limit: a right program must not fail because the machine is busy."""
    return CodeReward(**{"timeout_s": 20.0, "memory_mb": 512, "protection": level, **settings})


def statuses(reward: CodeReward, programs: list[str], truth: str = TEST, **extra: Any) -> list[str]:
    """Status of each program on the same tests."""
    verdicts = reward(programs, [example(truth, **extra)] * len(programs))
    assert all(verdict.reward == (verdict.status == "right") for verdict in verdicts)
    return [verdict.status for verdict in verdicts]
