from __future__ import annotations

from itertools import combinations

import pytest
import torch

from dare_lightning.evaluation.likelihood import negative_elbo
from dare_lightning.families.base import token_log_probs
from dare_lightning.replay.batch import SequenceBatch
from tests.tiny import MASK, TINY_BUILDERS, tiny_llada


def answer(length: int, seeds: int) -> SequenceBatch:
    ids = torch.tensor([[5, 6, 7, 8, 9, 10][: 3 + length]]).expand(seeds, -1)
    response = torch.zeros_like(ids, dtype=torch.bool)
    response[:, 3:] = True
    return SequenceBatch(ids, torch.ones_like(response), response, response, torch.arange(seeds), torch.arange(seeds))


def test_a_single_token_has_its_exact_log_prob() -> None:
    policy, batch = tiny_llada().double(), answer(1, 1)
    noisy = batch.ids.masked_fill(batch.response_mask, MASK)
    exact = -token_log_probs(policy, noisy, batch.ids, batch.attention_mask, batch.response_mask)[:, -1]
    torch.testing.assert_close(negative_elbo(policy, batch, rows=3), exact)


@pytest.mark.parametrize("family", ["sdar", "llada2"])
@torch.no_grad()
def test_a_block_policy_sees_the_clean_blocks_before(family: str) -> None:
    """With blocks of one token the bound is exact: the sum of each token's log-prob after the clean ones before it."""
    policy = TINY_BUILDERS[family](layers=1, width=16, heads=2, block_length=1).double()
    batch = answer(2, 300)
    one, exact = batch.select(slice(0, 1)), 0.0
    for place in (3, 4):
        alone = torch.zeros_like(one.response_mask)
        alone[:, place] = True
        noisy = one.ids.masked_fill(alone, policy.mask_token_id)
        exact -= float(token_log_probs(policy, noisy, one.ids, one.attention_mask, alone).sum())
    estimates = negative_elbo(policy, batch, rows=2)
    error = estimates.std() / len(estimates) ** 0.5
    assert abs(estimates.mean() - exact / 2) < 4 * error


def test_the_estimate_is_unbiased_for_the_bound_by_enumeration() -> None:
    policy, batch = tiny_llada().double(), answer(3, 600)
    one, places = batch.select(slice(0, 1)), (3, 4, 5)
    bound = torch.zeros(())
    for hidden in range(1, 4):
        subsets = list(combinations(places, hidden))
        for subset in subsets:
            mask = torch.zeros_like(one.response_mask)
            mask[:, list(subset)] = True
            noisy = one.ids.masked_fill(mask, MASK)
            scored = token_log_probs(policy, noisy, one.ids, one.attention_mask, mask).sum()
            # l is uniform on 1..3, weight L/l, every subset of that size equally likely; per token.
            bound = bound - scored * (3 / hidden) / (3 * len(subsets)) / 3
    with torch.no_grad():
        estimates = negative_elbo(policy, batch, rows=2)
    error = estimates.std() / len(estimates) ** 0.5
    assert abs(estimates.mean() - bound) < 4 * error
