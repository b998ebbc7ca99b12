from __future__ import annotations

from itertools import combinations

import torch

from dare_lightning.evaluation.likelihood import negative_elbo
from dare_lightning.families.base import token_log_probs
from dare_lightning.replay.batch import SequenceBatch
from tests.tiny import MASK, tiny_llada


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
