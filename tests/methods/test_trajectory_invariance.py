"""Methods on the rollout's own steps: what must not change an update, and what holds before the first one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dare_lightning.methods.cj_grpo import CJGRPO
from dare_lightning.methods.d_tree_rpo import DTreeRPO
from dare_lightning.methods.diffpo import DiFFPO
from dare_lightning.methods.dipo import DiPO
from dare_lightning.methods.justgrpo import JustGRPO
from dare_lightning.methods.mdpo import MDPO
from dare_lightning.methods.tracerl import TraceRL
from dare_lightning.replay.batch import TOKEN_COLUMNS, SequenceBatch, concatenate
from tests.methods.harness import Outcome, build, run, run_split
from tests.methods.table_model import TablePolicy, random_tables, sequence_batch


class HalfWay(DTreeRPO):
    """In the middle of a run, where the distillation has some weight."""

    progress = 0.5


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "cj_grpo": (CJGRPO, {"kl_coef": 0.1}),
    "cj_grpo_by_transition": (CJGRPO, {"aggregation": "transition_mean", "dual_clip": 1.5}),
    "cj_grpo_some_steps": (CJGRPO, {"max_train_steps": 2}),
    "tracerl": (TraceRL, {"kl_coef": 0.1, "shrink": 2}),
    "tracerl_summed": (TraceRL, {"kl_coef": 0.1, "sum_kl": True, "tokens_after_end": 1}),
    "dipo": (DiPO, {"kl_coef": 0.1}),
    "justgrpo": (JustGRPO, {"count_after_eos": True}),
    "diffpo": (DiFFPO, {"kl_coef": 0.1, "weight_cap": 1.5}),
}
WITH_COLUMNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mdpo": (MDPO, {"kl_coef": 0.1, "train_steps": 4, "temperature": 0.7}),
    "mdpo_up_to_the_end": (MDPO, {"train_steps": 9, "count_after_eos": False, "mask_eps": 1e-4}),
    "d_tree_rpo": (HalfWay, {"kl_coef": 0.1, "denoising_steps": 6, "distillation": 0.5}),
    "d_tree_rpo_bare": (DTreeRPO, {"distillation": 0.0, "denoising_steps": 6, "dual_clip": 2.0}),
}
EVERY = CASES | WITH_COLUMNS
every_case = pytest.mark.parametrize(("method", "settings"), CASES.values(), ids=CASES.keys())
every_method = pytest.mark.parametrize(("method", "settings"), EVERY.values(), ids=EVERY.keys())
with_blocks = pytest.mark.parametrize("block_length", [None, 4], ids=["masked", "blocks"])


def _batch() -> SequenceBatch:
    """Four answers of very different lengths in two groups; what follows the first end token (9) does not count."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 8, (4, 16), generator=draw)
    ids[1, 9:12] = 9
    start, end = torch.tensor([3, 4, 2, 8])[:, None], torch.tensor([6, 12, 16, 9])[:, None]
    column = torch.arange(16)
    response = (column >= start) & (column < end)
    completion = response.clone()
    completion[1, 10:] = False
    # Two tokens a step, in a random order; the last two of the second answer were filled in.
    order = torch.rand(4, 16, generator=draw).masked_fill(~response, 2.0).argsort(-1).argsort(-1)
    step = torch.where(response, order // 2, -1)
    step[1, 10:] = -1
    return sequence_batch(
        ids,
        start[:, 0],
        column < end,
        completion_mask=completion,
        commit_step=step,
        commit_log_probs=-3 * torch.rand(4, 16, generator=draw, dtype=torch.float64),
        advantage=torch.tensor([1.0, -0.5, 0.25, -2.0], dtype=torch.float64),
        group_index=torch.tensor([5, 5, 7, 7]),
    )


def _with_states(batch: SequenceBatch) -> SequenceBatch:
    """The same with every pass of the rollout, random proposals among them, and their rewards."""
    draw = torch.Generator().manual_seed(4)
    assert batch.commit_step is not None
    step = batch.commit_step[:, None]
    passes = batch.commit_step.amax(1) + 1
    at = torch.arange(int(passes.max()))[:, None]
    made = at < passes[:, None, None]
    hidden = batch.response_mask[:, None] & ((step < 0) | (step >= at)) & made
    known = batch.ids[:, None].expand(hidden.shape).masked_fill(~made, 0)
    proposed = torch.randint(0, 9, hidden.shape, generator=draw)
    return replace(
        batch,
        states=known.masked_fill(hidden, 10),
        proposals=torch.where(hidden, proposed, known),
        confidence=torch.rand(hidden.shape, generator=draw, dtype=torch.float64) * hidden,
        forward_passes=passes,
        step_rewards=torch.rand(hidden.shape[:2], generator=draw, dtype=torch.float64),
    )


def _trees() -> SequenceBatch:
    """A tree of 2 and then 3 children, grown in 6 steps, and one whose second node was finished before it branched."""
    draw = torch.Generator().manual_seed(6)
    ids = torch.randint(0, 8, (12, 15), generator=draw)
    step = torch.nn.functional.pad(torch.arange(12) // 2, (3, 0), value=-1).repeat(12, 1)
    node = torch.stack([torch.arange(12) // 3, torch.arange(12)], 1)
    leader = torch.arange(12) // 3 * 3
    ids[:, :9] = torch.where(torch.arange(9) < 3, ids[:1, :9], ids[leader, :9])
    ids[4, 12] = 9  # an end in one leaf
    ids[9:, 8:] = 9  # and one before the second half
    step[9:, 9:] = -1
    return sequence_batch(
        ids,
        3,
        commit_step=step,
        node_index=node,
        group_index=torch.arange(12) // 6,
        reward=torch.rand(12, generator=draw, dtype=torch.float64),
    )


def _credited(module: Any) -> SequenceBatch:
    """What this method learns from."""
    if isinstance(module, MDPO):
        batch: SequenceBatch = module.credit(_with_states(_batch()))
        return batch
    if isinstance(module, DTreeRPO):
        grown: SequenceBatch = module.credit(_trees())
        return grown
    return _batch()


def _table(method: Any, block_length: int | None) -> TablePolicy:
    """A policy on which the method is defined."""
    if block_length is not None and any(case.on == "block" for case in method.undefined):
        pytest.skip(f"{method.__name__} is not defined on block policies")
    return TablePolicy(random_tables(), block_length=block_length)


def _module(method: Any, settings: dict[str, Any], block_length: int | None, **more: Any) -> tuple[Any, SequenceBatch]:
    """A policy that is off its old policy and its reference, and a batch that knows both."""
    model = random_tables()
    module = build(method, _table(method, block_length), **settings, **more)
    batch = _credited(module)
    old, ref = TablePolicy(model, "W_old", block_length), TablePolicy(model, "W_ref", block_length)
    for table in (old, ref):  # close enough for some ratios to stay unclipped
        table.W.data = 0.9 * module.policy.W.data + 0.1 * table.W.data
    rows = module.corrupt(batch)
    reference = module.frozen_log_probs(ref, rows, batch)[:, None] if module.needs_reference else None
    return module, replace(
        batch, old_log_probs=module.frozen_log_probs(old, rows, batch)[:, None], ref_log_probs=reference
    )


def _assert_same(got: Outcome, expected: Outcome) -> None:
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got.gradient, expected.gradient, rtol=1e-10, atol=1e-12)
    assert float(expected.gradient.abs().max()) > 0


@every_method
@with_blocks
@pytest.mark.parametrize(("order", "size"), [([0, 1, 2, 3], 1), ([3, 1, 0, 2], 3)])
def test_micro_batches_and_their_order_do_not_change_the_update(
    method: Any, settings: Any, block_length: Any, order: list[int], size: int
) -> None:
    module, batch = _module(method, settings, block_length)
    rows = torch.tensor(order + list(range(4, len(batch))))
    _assert_same(run_split(module, batch, list(rows.split(size))), run(module, module.corrupt(batch), batch))


@every_method
@with_blocks
def test_padding_does_not_change_the_update(method: Any, settings: Any, block_length: Any) -> None:
    module, batch = _module(method, settings, block_length)
    columns: dict[str, Any] = {
        name: torch.nn.functional.pad(value, (3, 2), value=TOKEN_COLUMNS[name])
        for name, value in batch.columns()
        if name in TOKEN_COLUMNS
    }
    padded = replace(batch, **columns)
    _assert_same(run(module, module.corrupt(padded), padded), run(module, module.corrupt(batch), batch))


@every_method
@with_blocks
@pytest.mark.parametrize(("plan", "rows_per_forward"), [("accumulate", 1), ("replay", 2)])
def test_gradient_plans_agree(
    method: Any, settings: Any, block_length: Any, plan: str, rows_per_forward: int | None
) -> None:
    module, batch = _module(method, settings, block_length)
    expected = run(module, module.corrupt(batch), batch)
    planned, batch = _module(method, settings, block_length, gradient_plan=plan, rows_per_forward=rows_per_forward)
    got = run(planned, planned.corrupt(batch), batch)
    _assert_same(got, expected)
    for name in expected.metrics.keys() - {"ratio_max"}:  # means over parts, not sums
        assert got.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-9, abs=1e-15), name


@every_method
def test_the_count_is_the_denominator_of_the_rows(method: Any, settings: Any) -> None:
    module, batch = _module(method, settings, None)
    assert torch.equal(module.count(batch), module.denominator(module.corrupt(batch), batch))


@every_method
@with_blocks
def test_before_the_first_update_ratios_are_one_and_nothing_diverges(
    method: Any, settings: Any, block_length: Any
) -> None:
    module = build(method, _table(method, block_length), **settings)
    # Parts of a rollout are scored apart and have different numbers of rows.
    fresh = _credited(module)
    parts = [module.freeze_policies(fresh.select(part), 2, True) for part in torch.arange(len(fresh)).split(1)]
    batch = concatenate(parts)
    state = torch.get_rng_state()
    for iteration in range(2):
        view = replace(batch, iteration=iteration)
        _, metrics = module.loss_and_metrics(module.corrupt(view), replace(view, denominator=module.count(view)))
        assert float(metrics["ratio_mean"][0] / metrics["ratio_mean"][1]) == pytest.approx(1, abs=1e-12)
        assert float(metrics["ratio_max"][0] / metrics["ratio_max"][1]) == pytest.approx(1, abs=1e-12)
        if module.kl_coef > 0:
            assert float(metrics["kl"][0]) == pytest.approx(0, abs=1e-12)
    assert torch.equal(torch.get_rng_state(), state)


@every_method
def test_a_single_update_needs_no_stored_old_policy(method: Any, settings: Any) -> None:
    module = build(method, TablePolicy(random_tables()), **settings)
    stored = module.freeze_policies(_credited(module), 1, keep_old=True)
    fresh = module.freeze_policies(_credited(module), 1, keep_old=False)
    assert fresh.old_log_probs is None
    _assert_same(run(module, module.corrupt(fresh), fresh), run(module, module.corrupt(stored), stored))


@every_case
@pytest.mark.parametrize("shape", ["end_at_once", "one_token", "nothing_counts", "nothing_written"])
def test_odd_completions_give_a_finite_loss_and_gradient(method: Any, settings: Any, shape: str) -> None:
    module = build(method, TablePolicy(random_tables()), **settings)
    batch = _batch()
    first = batch.response_mask & (batch.response_mask.cumsum(-1) == 1)
    if shape == "end_at_once":
        batch = replace(batch, completion_mask=first)
    if shape == "one_token":
        batch = replace(batch, response_mask=first, completion_mask=first)
    if shape == "nothing_counts":
        batch = replace(batch, completion_mask=torch.zeros_like(first))
    if shape == "nothing_written":
        batch = replace(batch, commit_step=torch.full_like(batch.ids, -1))
    outcome = run(module, module.corrupt(batch), batch)
    assert outcome.loss.isfinite()
    assert outcome.gradient.isfinite().all()


def test_memory_does_not_grow_with_the_number_of_steps() -> None:
    """Rows that one pass scores together stay as many, however many steps the rollout had."""
    read: list[int] = []

    class Counting(TablePolicy):
        def denoise(self, noisy_ids: Any, *rest: Any) -> Any:
            read.append(len(noisy_ids))
            return super().denoise(noisy_ids, *rest)

    for length in (6, 30):
        read.clear()
        module = build(CJGRPO, Counting(random_tables()), gradient_plan="accumulate", rows_per_forward=1)
        ids = torch.randint(0, 8, (2, length + 2), generator=torch.Generator().manual_seed(1))
        step = torch.nn.functional.pad(torch.arange(length), (2, 0), value=-1).expand(2, -1)
        batch = sequence_batch(ids, 2, commit_step=step, advantage=torch.tensor([1.0, -1.0], dtype=torch.float64))
        run(module, module.corrupt(batch), batch)
        assert read == [2] * length


def test_some_steps_stand_for_all_on_average() -> None:
    """Over every draw of one of a completion's steps, the gradient is that of all of them."""
    policy = TablePolicy(random_tables())
    whole = build(CJGRPO, policy, aggregation="transition_mean")
    some = build(CJGRPO, policy, aggregation="transition_mean", max_train_steps=1)
    batch = _batch().select(torch.tensor([1]))
    expected = run(whole, whole.corrupt(batch), batch)
    # Each draw is one of three steps; the mean of one gradient of each is the mean of all draws.
    found: dict[int, torch.Tensor] = {}
    for iteration in range(60):
        view = replace(batch, iteration=iteration)
        rows = some.corrupt(view)
        drawn = int(some.steps(view)[rows.score_mask.any(1)].unique())
        found.setdefault(drawn, run(some, rows, view).gradient)
    steps = some.steps(batch)[some.counted(batch) & (some.steps(batch) >= 0)].unique()
    assert sorted(found) == steps.tolist()
    torch.testing.assert_close(torch.stack(list(found.values())).mean(0), expected.gradient)


def test_a_rollout_without_steps_is_refused_in_words() -> None:
    module = build(CJGRPO, TablePolicy(random_tables()))
    with pytest.raises(ValueError, match="does not say which step wrote each token"):
        module.corrupt(replace(_batch(), commit_step=None))
