"""What a run costs, where its budget ends it, and that a resumed run goes on counting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dare_lightning.callbacks.budget import Budget
from dare_lightning.callbacks.rollout_checkpoint import RolloutCheckpoint, newest_checkpoint
from tests.callbacks.toy import Toy
from tests.equalities.conftest import Keep, Offline, Online, Record, trainer
from tests.shared import ROOT

NAMES = {
    *("rollout_passes", "old_policy_passes", "reference_passes", "update_passes", "training_passes"),
    *("passes", "tokens", "peak_memory_mb"),
}


def spent(record: Record, name: str) -> list[float]:
    return record.series(f"cost/{name}")


@pytest.mark.parametrize("kind", [Online, Offline])
def test_every_run_logs_its_cost_under_the_same_names(kind: Any) -> None:
    record, documented = Record(), (ROOT / "docs" / "diagnostics.md").read_text(encoding="utf-8")
    kind().fit(Budget(), logger=record)
    own = ("rollout/seconds/",)
    logged = {n for n in record.names() if n.startswith(("train/", "rollout/", "cost/")) and not n.startswith(own)}
    assert [name for name in sorted(logged) if f"`{name}`" not in documented] == []
    assert {name.removeprefix("cost/") for name in record.names() if name.startswith("cost/")} == NAMES
    total = [a + b for a, b in zip(spent(record, "rollout_passes"), spent(record, "training_passes"), strict=True)]
    assert spent(record, "passes") == total
    assert total == sorted(total)
    assert total[0] > 0
    assert spent(record, "peak_memory_mb")[-1] > 50


def test_a_rollout_costs_its_passes_and_those_of_each_policy() -> None:
    run, record = Online(), Record()
    run.fit(Budget(), logger=record, max_epochs=1)
    # 16 answers of 17 tokens in 2 steps, of which those to one prompt begin as one row.
    assert spent(record, "rollout_passes") == [4 + 16]
    # Three rows of each answer, in 2 inner epochs; the one that hides all is the same for answers to one prompt.
    most = 2 * (4 + 2 * 16)
    # A row that hides nothing is not run.
    assert spent(record, "old_policy_passes") == spent(record, "reference_passes")
    assert 0.9 * most < spent(record, "old_policy_passes")[0] <= most
    # Updates see the answers in another order: those to one prompt may be apart.
    assert 0.9 * most < spent(record, "update_passes")[0] <= 2 * 3 * 16
    assert spent(record, "tokens")[0] == spent(record, "passes")[0] * len(run.data.train[0][1] + [0] * 17)


def test_validation_is_not_part_of_the_cost() -> None:
    record, without = Record(), Record()
    Offline(val_count=4).fit(Budget(), logger=record)
    Offline(val_count=4).fit(Budget(), logger=without, limit_val_batches=0)
    assert record.series("val/loss")
    assert spent(record, "passes") == spent(without, "passes")


@pytest.mark.parametrize("limit", ["max_passes", "max_training_passes"])
def test_a_run_ends_with_the_rollout_in_which_its_budget_is_spent(limit: str) -> None:
    record = Record()
    run = Online()
    ended = run.fit(Budget(**{limit: 1}), logger=record)
    assert (ended.current_epoch, ended.global_step) == (1, 4)
    assert len(spent(record, "passes")) == 1


def test_a_run_on_fixed_data_ends_with_the_step_in_which_its_budget_is_spent(tmp_path: Path) -> None:
    record = Record()
    parts = [Budget(max_passes=5), RolloutCheckpoint(str(tmp_path / "kept"))]
    assert Offline().fit(*parts, logger=record).global_step == 2
    passes = spent(record, "passes")
    assert passes[0] < 5 <= passes[1]
    whole, longer = Offline(), Record()
    resumed = whole.fit(Budget(max_passes=9), logger=longer, ckpt_path=newest_checkpoint(tmp_path / "kept"))
    assert resumed.global_step == 3
    assert passes[1] < 9 <= spent(longer, "passes")[0] <= passes[1] + 4


@pytest.mark.parametrize("point", ["inside-3", "boundary-4", "inside-5"])
def test_a_resumed_run_goes_on_counting(point: str, tmp_path: Path) -> None:
    whole, rest = Record(), Record()
    Online().fit(Budget(), Keep(tmp_path, at=[3, 4, 5]), logger=whole)
    Online().fit(Budget(), logger=rest, ckpt_path=tmp_path / f"{point}.ckpt")
    for name in NAMES - {"peak_memory_mb"}:
        assert spent(rest, name)[-1] == spent(whole, name)[-1]


def test_a_run_that_its_budget_ended_goes_on_when_it_is_given_more(tmp_path: Path) -> None:
    Online().fit(Budget(max_passes=1), RolloutCheckpoint(str(tmp_path / "kept")))
    saved = newest_checkpoint(tmp_path / "kept")
    again, more = Record(), Record()
    assert Online().fit(Budget(max_passes=1), logger=again, ckpt_path=saved).global_step == 4
    assert not again.series("train/loss")
    assert Online().fit(Budget(max_passes=100_000), logger=more, ckpt_path=saved).global_step == 8


def test_limits_and_modules_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="budget.max_passes=0 must be at least 1, or null"):
        Budget(max_passes=0)
    with pytest.raises(ValueError, match="needs a DiffusionPolicyModule, found Toy"):
        trainer([Budget()]).fit(Toy())
