"""Sequence ELBOs against the recorded implementations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dare_lightning.diffusion.corruption import mask_below, mask_probability
from dare_lightning.diffusion.likelihood import elbo, inverse_level, pair_elbo, row_sums
from dare_lightning.families.base import token_log_probs
from tests.methods.table_model import TablePolicy, golden
from tests.shared import golden_files


def _double(value: Any) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _scored(policy: TablePolicy, noisy: Tensor, clean: Tensor, mask: Tensor) -> Tensor:
    """[R, L] -> [R, 1, L]: each row is a sequence with one noisy row."""
    return token_log_probs(policy, noisy, clean, torch.ones_like(mask), mask)[:, None]


@pytest.mark.parametrize("path", [*golden_files("algorithms/elbo_l_*.json"), *golden_files("algorithms/elbo_t_*.json")])
def test_monte_carlo_elbo_is_the_recorded_one(path: Path) -> None:
    case = golden(path)
    inputs, policy = case["inputs"], TablePolicy(case["model"])
    noisy = torch.tensor(inputs["noisy_input_ids"])
    mask = torch.tensor(inputs["mask_indices"]).bool()
    clean = torch.tensor(inputs["prompt_ids"] + inputs["response_ids"]).expand_as(noisy)
    scored = _scored(policy, noisy, clean, mask).transpose(0, 1)  # the rows are rows of one sequence
    weight = inverse_level(_double(inputs["p_mask"]))[None, :, None] * mask
    torch.testing.assert_close(
        row_sums(scored, weight)[0], _double(case["outputs"]["elbo_per_sample"]), **case["tolerance"]
    )
    value = elbo(scored, weight)
    torch.testing.assert_close(value[0], _double(case["outputs"]["elbo"]), **case["tolerance"])
    (gradient,) = torch.autograd.grad(value.sum(), policy.W)
    torch.testing.assert_close(gradient, _double(case["outputs"]["grad_W_of_elbo"]), **case["tolerance"])


@pytest.mark.parametrize("path", golden_files("algorithms/elbo_t_*.json"))
def test_recorded_times_give_the_recorded_probabilities_and_masks(path: Path) -> None:
    case = golden(path)
    inputs = case["inputs"]
    p = mask_probability(_double(inputs["t"]), case["config"]["eps"])
    torch.testing.assert_close(p, _double(inputs["p_mask"]), **case["tolerance"])
    mask = torch.tensor(inputs["mask_indices"]).bool()
    response = (torch.arange(mask.shape[1]) >= len(inputs["prompt_ids"]))[None]
    assert torch.equal(mask_below(_double(inputs["uniform"])[None], response, p[None])[0], mask)


@pytest.mark.parametrize("path", golden_files("algorithms/elbo_espo_*.json"))
def test_pair_elbo_is_the_recorded_one(path: Path) -> None:
    case = golden(path)
    inputs, policy = case["inputs"], TablePolicy(case["model"])
    clean, noisy = torch.tensor(inputs["input_ids"]), torch.tensor(inputs["noisy_input_ids"])
    mask = torch.tensor(inputs["mask_indices"]).bool()
    start = inputs["prompt_length"]
    length = clean.shape[1] - start
    p = _double(inputs["p_mask"])
    weight = inverse_level(p)[:, None, None] * mask[:, None]
    scored = _scored(policy, noisy, clean, mask)
    value = elbo(scored, weight)
    if case["config"]["reduce_var"]:
        rest = ~mask & (torch.arange(clean.shape[1]) >= start)
        level = (length - mask.sum(-1)).double() / (length + 1)
        torch.testing.assert_close(level, length / (length + 1) - p, rtol=0, atol=1e-12)
        complement = _scored(policy, torch.tensor(inputs["complement_input_ids"]), clean, rest)
        value = pair_elbo(scored, complement, weight, inverse_level(level)[:, None, None] * rest[:, None])
    torch.testing.assert_close(value, _double(case["outputs"]["elbo"]), **case["tolerance"])
    (gradient,) = torch.autograd.grad(value.sum(), policy.W)
    torch.testing.assert_close(gradient, _double(case["outputs"]["grad_W_of_sum"]), **case["tolerance"])
