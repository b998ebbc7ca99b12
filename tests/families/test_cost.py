"""What counts as a forward pass, and as a token."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from dare_lightning.families.base import token_log_probs
from dare_lightning.families.cost import Cost
from dare_lightning.generation.block import BlockBackend
from dare_lightning.generation.builtin import BuiltinBackend
from dare_lightning.methods.coupled_grpo import CoupledGRPO
from dare_lightning.methods.sft import SFT
from tests.methods.table_model import sequence_batch
from tests.tiny import TINY_BUILDERS, tiny_llada

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12], [5, 6, 7, 8, 9, 10, 0, 0], [7, 6, 7, 8, 0, 0, 0, 0]])
EXISTS = torch.arange(8) < torch.tensor([[8], [6], [4]])


@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
@pytest.mark.parametrize("family", TINY_BUILDERS)
def test_every_family_counts_rows_and_the_tokens_that_exist(family: str, attention: str) -> None:
    policy = TINY_BUILDERS[family](layers=1, width=16, heads=2)
    policy.attention = attention
    cost = Cost()
    with cost.spent_on("update"):
        policy.hidden_states(IDS, EXISTS)
        policy.hidden_states(IDS[:1])
    assert cost.passes("update") == 4
    assert cost.tokens("update") == 18 + 8


def test_a_cached_pass_counts_the_columns_it_reads() -> None:
    policy, cost = tiny_llada(), Cost()
    backend = BuiltinBackend(max_new_tokens=16, steps=8, block_length=8, cache="prefix", temperature=1.0)
    backend.update_weights(policy, 0)
    with cost.spent_on("rollout"):
        backend.generate([[5, 6, 7], [7, 8, 9]], [1, 2])
    assert cost.passes("rollout") == backend.stats.row_forwards
    assert cost.tokens("rollout") == backend.stats.tokens
    other = Cost()
    with other.spent_on("rollout"):
        backend.generate([[5, 6, 7, 8, 9], [7, 5, 6]], [1, 2])
    # A block's first pass reads everything: two columns before the shorter prompt do not exist, in two blocks.
    assert other.tokens("rollout") == backend.stats.tokens - 4


def test_a_block_policys_cached_passes_count_the_columns_they_read() -> None:
    policy, cost = TINY_BUILDERS["sdar"](layers=1, width=16, heads=2), Cost()
    backend = BlockBackend(max_new_tokens=8, temperature=1.0)
    backend.update_weights(policy, 0)
    with cost.spent_on("rollout"):
        backend.generate([[5, 6, 7, 8], [7, 8, 9, 5]], [1, 2])
    assert cost.passes("rollout") == backend.stats.row_forwards
    assert cost.tokens("rollout") == backend.stats.tokens


def test_nothing_is_counted_unasked_and_the_outer_purpose_stays() -> None:
    policy, cost = tiny_llada(), Cost()
    policy.hidden_states(IDS)
    with cost.spent_on("validation"), cost.spent_on("update"):
        policy.hidden_states(IDS)
    policy.hidden_states(IDS)
    assert (cost.passes("update"), cost.passes("validation")) == (0, 3)


def test_rows_that_read_the_same_count_once() -> None:
    policy, cost = tiny_llada(), Cost()
    ids, noisy = torch.tensor([[5, 6, 7], [5, 6, 8], [5, 7, 8]]), torch.tensor([[5, 6, 4], [5, 6, 4], [5, 7, 4]])
    exists, scored = torch.ones_like(ids, dtype=torch.bool), noisy == 4
    with cost.spent_on("update"):
        token_log_probs(policy, noisy, ids, exists, scored)
    assert (cost.passes("update"), cost.tokens("update")) == (2, 6)


def _step(module: Any, batch: Any) -> Cost:
    rows = module.corrupt(batch)
    object.__setattr__(batch, "denominator", module.denominator(rows, batch))
    module.loss_and_metrics(rows, batch)[0].backward()
    return module.cost


@pytest.mark.parametrize(("plan", "passes"), [("single", 4), ("accumulate", 4), ("replay", 8)])
def test_passes_that_are_made_again_for_the_gradient_count_again(plan: Any, passes: int) -> None:
    optimizer = partial(torch.optim.SGD, lr=0.1)
    module = SFT(tiny_llada(), optimizer, samples=4, gradient_plan=plan, rows_per_forward=1)
    cost = _step(module, sequence_batch([[5, 6, 7, 8, 9, 10, 11, 12]], 2))
    assert cost.passes("update") == passes
    assert cost.tokens("update") == 8 * passes


def test_the_old_policy_and_the_reference_are_counted_apart() -> None:
    module = CoupledGRPO(tiny_llada(), partial(torch.optim.SGD, lr=0.1), kl_coef=0.1)
    module.keep_reference()
    batch = sequence_batch([[5, 6, 7, 8, 9]], 2, advantage=torch.tensor([1.0]))
    _step(module, module.freeze_policies(batch, inner_epochs=2, keep_old=True))
    assert [module.cost.passes(purpose) for purpose in ("old_policy", "reference", "update")] == [6, 6, 3]
