"""Two processes that train together do what one does alone."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from dare_lightning.callbacks.budget import Budget
from tests.equalities.conftest import Record, weights
from tests.equalities.runs import RUNS
from tests.equalities.two_ranks import BOUNDARY, INSIDE
from tests.processes import Process, environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Clocks and memory, a maximum that is taken over each micro-batch, what is looked at in a few completions of each rank,
# and passes: rows of one micro-batch that read the same are run once, and the micro-batches are others.
OWN = ("rollout/seconds", "rollout/tokens_per_second", "train/ratio_max", "rollout/log_prob_gap", "cost/")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes have trained."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_PORT": str(port), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "test"}
    ranks = []
    for rank in "01":
        own = environment(**shared, RANK=rank, LOCAL_RANK=rank)
        with (folder / f"rank{rank}.txt").open("w") as output:
            ranks.append(Process("tests.equalities.two_ranks", str(folder), cwd=folder, env=own, output=output))
    try:
        codes = [process.wait(timeout=480) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert codes == [0, 0], "".join((folder / f"rank{rank}.txt").read_text()[-3000:] for rank in "01")
    return folder


@pytest.fixture(scope="module")
def two(folder: Path) -> Any:
    return torch.load(folder / "two.pt")


def _compared(steps: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    return {step: {n: v for n, v in metrics.items() if not n.startswith(OWN)} for step, metrics in steps.items()}


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_are_one(name: str, two: Any) -> None:
    run, record = RUNS[name](), Record()
    run.fit(Budget(), logger=record)
    torch.testing.assert_close(two[name]["weights"], weights(run), rtol=1e-6, atol=1e-6)
    one, other = _compared(record.steps), _compared(two[name]["steps"])
    assert other.keys() == one.keys()
    for step, metrics in one.items():
        assert other[step] == pytest.approx(metrics, rel=1e-5, abs=1e-9), step
    _assert_same_cost(two[name]["steps"], record)
    assert len(record.series("train/loss")) == 8
    assert max(record.series("train/grad_norm")) > 1e-3


def _assert_same_cost(steps: dict[int, dict[str, float]], one: Record) -> None:
    two = Record()
    two.steps = steps
    for purpose in ("rollout", "old_policy", "reference"):
        assert two.series(f"cost/{purpose}_passes") == one.series(f"cost/{purpose}_passes")
    for name in ("cost/update_passes", "cost/tokens"):
        assert two.series(name) == pytest.approx(one.series(name), rel=0.2)


def test_a_resume_of_two_ranks_goes_on_counting(two: Any) -> None:
    for name in ("cost/passes", "cost/tokens"):
        whole, resumed = ([s[name] for s in two[key]["steps"].values() if name in s] for key in ("online", "resumed"))
        assert resumed[-1] == whole[-1]


def test_ranks_share_the_samples_of_every_step(two: Any) -> None:
    steps = [step for step, _, _ in two["online"]["seen"]]
    assert steps == [step for step in range(8) for _ in range(2)]
    samples = {sample for step, chosen, _ in two["online"]["seen"] if step in (0, 1) for sample in chosen}
    assert len(samples) == 8
    assert {sample // 4 for sample in samples} == {0, 2}


def test_a_resume_of_two_ranks_inside_a_rollout_is_exact(two: Any) -> None:
    torch.testing.assert_close(two["resumed"]["weights"], two["online"]["weights"], rtol=0, atol=0)
    assert two["resumed"]["seen"] == [batch for batch in two["online"]["seen"] if batch[0] >= 3]


def test_one_rank_cannot_take_the_buffers_of_two(folder: Path) -> None:
    run = RUNS["online"]()
    with pytest.raises(
        RuntimeError, match="saved by 2 ranks, this run has 1: resume with 2, or from a checkpoint at a"
    ):
        run.fit(ckpt_path=folder / "online" / INSIDE)


def test_one_rank_cannot_go_on_inside_an_epoch_of_two(folder: Path) -> None:
    with pytest.raises(RuntimeError, match="inside an epoch, with ranks=2; this run has ranks=1"):
        RUNS["offline"]().fit(ckpt_path=folder / "offline" / INSIDE)


@pytest.mark.parametrize("name", RUNS)
def test_one_rank_goes_on_where_an_epoch_of_two_ended(name: str, folder: Path, two: Any) -> None:
    run = RUNS[name]()
    assert run.fit(ckpt_path=folder / name / BOUNDARY).global_step == 8
    torch.testing.assert_close(weights(run), two[name]["weights"], rtol=1e-6, atol=1e-6)
