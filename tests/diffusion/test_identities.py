"""What the estimators equal, summed over every mask of a short response."""

from __future__ import annotations

from itertools import permutations, product
from math import comb, factorial
from typing import Any

import pytest
import torch
from torch import Tensor

from dare_lightning.diffusion.corruption import Masks, noisy_rows
from dare_lightning.diffusion.likelihood import coupled_token_log_probs, elbo, inverse_level, pair_elbo
from dare_lightning.families.base import token_log_probs
from tests.methods.table_model import TablePolicy, random_tables, sequence_batch

PROMPT = 2
EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


class AllMasks:
    """Every mask of one response, and the log-probs of the policy under each."""

    def __init__(self, length: int) -> None:
        policy = TablePolicy(random_tables(seed=length))
        self.batch = sequence_batch([[3, 1, *range(4, 4 + length)]], PROMPT)
        patterns = torch.tensor(list(product([False, True], repeat=length)))
        self.mask = torch.nn.functional.pad(patterns, (PROMPT, 0))[None]
        self.size = self.mask.sum(-1)[0]
        self.length = length
        ones = torch.ones(self.mask.shape[:2], dtype=torch.float64)
        rows = noisy_rows(
            self.batch.ids, Masks(self.mask, ones), policy.mask_token_id, ones[..., None], score_mask=self.mask
        )
        exists = self.batch.attention_mask.expand(len(patterns), -1)
        clean = self.batch.ids.expand(len(patterns), -1)
        with torch.no_grad():
            self.log_probs = token_log_probs(policy, rows.noisy_ids[0], clean, exists, self.mask[0])

    def sums(self) -> Tensor:
        """Sum of the log-probs of the hidden tokens, for each mask."""
        return self.log_probs.sum(-1)

    def l_form(self) -> Tensor:
        """Expectation over l ~ U{1..L} and all sets of that size."""
        total = torch.zeros((), dtype=torch.float64)
        for pattern, size in enumerate(self.size.tolist()):
            if size:
                probability = 1 / (self.length * comb(self.length, size))
                weight = self.mask[:, pattern : pattern + 1].double() * (self.length / size)
                total += probability * elbo(self.log_probs[None, pattern : pattern + 1], weight)[0]
        return total


@pytest.fixture(params=[1, 3, 4], ids="L={}".format)
def every(request: pytest.FixtureRequest) -> AllMasks:
    return AllMasks(request.param)


def test_the_l_form_equals_the_t_form_integrated_over_the_level(every: AllMasks) -> None:
    # Integral of t^k (1-t)^(L-k) / t is the Beta function B(k, L-k+1).
    beta = [0.0] + [
        factorial(k - 1) * factorial(every.length - k) / factorial(every.length) for k in range(1, every.length + 1)
    ]
    integrated = sum(beta[size] * every.sums()[i] for i, size in enumerate(every.size.tolist()))
    torch.testing.assert_close(integrated, every.l_form(), **EXACT)


def test_the_l_form_equals_the_complementary_pair(every: AllMasks) -> None:
    full = (1 << every.length) - 1
    total = torch.zeros((), dtype=torch.float64)
    for pattern, size in enumerate(every.size.tolist()):
        sides = []
        for side, count in ((pattern, size), (full ^ pattern, every.length - size)):
            level = torch.tensor([[count / (every.length + 1)]], dtype=torch.float64)
            sides.append(
                (
                    every.log_probs[None, side : side + 1],
                    inverse_level(level)[..., None] * every.mask[:, side : side + 1],
                )
            )
        (scored, weight), (rest, rest_weight) = sides
        probability = 1 / ((every.length + 1) * comb(every.length, size))
        total += probability * pair_elbo(scored, rest, weight, rest_weight)[0]
    torch.testing.assert_close(total, every.l_form(), **EXACT)


def test_the_l_form_equals_the_mean_over_all_autoregressive_orders(every: AllMasks) -> None:
    total = torch.zeros((), dtype=torch.float64)
    index = {tuple(m.tolist()): i for i, m in enumerate(every.mask[0])}
    for order in permutations(range(PROMPT, PROMPT + every.length)):
        hidden = every.mask[0, -1].clone()
        for position in order:
            total += every.log_probs[index[tuple(hidden.tolist())], position]
            hidden[position] = False
    torch.testing.assert_close(total / factorial(every.length), every.l_form(), **EXACT)


def test_the_fully_hidden_row_is_the_one_step_estimate(every: AllMasks) -> None:
    last = every.log_probs[None, -1:]
    torch.testing.assert_close(elbo(last, every.mask[:, -1:] * 1.0)[0], last.sum(), **EXACT)


@pytest.mark.parametrize(("normalize", "factor"), [(False, 1.5), (True, 1.0)])
def test_the_coupled_weights_count_a_log_prob_one_and_a_half_times(normalize: bool, factor: float) -> None:
    every = AllMasks(3)
    # A policy that does not look at its context, so that each token has one log-prob whatever is hidden.
    constant = every.log_probs[-1]
    q = torch.tensor(0.3, dtype=torch.float64)
    mean = torch.zeros_like(constant)
    for pattern, size in enumerate(every.size.tolist()):
        masks = torch.stack([every.mask[0, -1], every.mask[0, pattern], every.mask[0, -1] & ~every.mask[0, pattern]])[
            None
        ]
        level = torch.ones(3, dtype=torch.float64) if normalize else torch.stack([torch.ones_like(q), q, 1 - q])
        estimate = coupled_token_log_probs(constant * masks, inverse_level(level)[None, :, None] * masks)[0]
        mean += q**size * (1 - q) ** (every.length - size) * estimate
    torch.testing.assert_close(mean, factor * constant, **EXACT)
