"""Samplers of the forward process: distributions, counts, and whose randomness decides."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dare_lightning.diffusion.corruption import (
    Masks,
    coupled_masks,
    draw_at_times,
    draw_counts,
    draw_pairs,
    draw_prompt,
    draw_times,
    mask_lowest,
    mask_probability,
    stratified_counts,
    stratified_times,
    tie_trailing_eos,
)

Sampler = Callable[[Tensor, Tensor, tuple[int, ...]], Tensor]

SAMPLERS: dict[str, Sampler] = {
    "times": lambda m, s, salt: draw_times(m, s, salt, rows=3).mask,
    "stratified_times": lambda m, s, salt: draw_times(m, s, salt, rows=3, stratified=True).mask,
    "counts": lambda m, s, salt: draw_counts(m, s, salt, rows=3).mask,
    "stratified_counts": lambda m, s, salt: draw_counts(m, s, salt, rows=3, stratified=True).mask,
    "pairs": lambda m, s, salt: torch.cat([side.mask for side in draw_pairs(m, s, salt, pairs=2)], 1),
    "coupled": lambda m, s, salt: coupled_masks(draw_times(m, s, salt, low=0.2, high=0.8, eps=0.0), m).mask,
    "prompt": lambda m, s, salt: draw_prompt(m, s, salt, probability=0.5)[:, None],
    "fixed_times": lambda m, s, salt: draw_at_times(m, s, torch.full((len(m), 2), 0.5), salt).mask,
}

every_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())


def _maskable(samples: int = 5, length: int = 40, prompt: int = 7, padding: int = 6) -> Tensor:
    mask = torch.zeros(samples, length, dtype=torch.bool)
    mask[:, prompt : length - padding] = True
    return mask


def _chi_square(observed: Tensor) -> float:
    """The statistic of a uniform distribution over the cells."""
    expected = observed.sum().double() / len(observed)
    return float(((observed - expected).square() / expected).sum())


def _limit(cells: int) -> float:
    """Five standard deviations above the mean of chi-square."""
    degrees = cells - 1
    return degrees + 5 * math.sqrt(2 * degrees)


@every_sampler
def test_only_maskable_tokens_are_hidden(sampler: Sampler) -> None:
    maskable = _maskable(200)
    hidden = sampler(maskable, torch.arange(200), ())
    assert hidden.any()
    assert not (hidden & ~maskable[:, None]).any()


@every_sampler
def test_a_sample_keeps_its_mask_whatever_the_batch(sampler: Sampler) -> None:
    maskable, seeds = _maskable(), torch.tensor([9, 1, 4, 7, 2])
    whole = sampler(maskable, seeds, (3,))
    order = torch.tensor([4, 0, 2])
    assert torch.equal(sampler(maskable[order], seeds[order], (3,)), whole[order])


@every_sampler
def test_padding_on_either_side_moves_nothing(sampler: Sampler) -> None:
    maskable, seeds = _maskable(), torch.arange(5)
    wider = torch.nn.functional.pad(maskable, (3, 5))
    assert torch.equal(sampler(wider, seeds, ())[..., 3:-5], sampler(maskable, seeds, ()))


@every_sampler
def test_seeds_and_salts_give_different_masks(sampler: Sampler) -> None:
    maskable = _maskable()
    first = sampler(maskable, torch.arange(5), (0,))
    assert not torch.equal(first, sampler(maskable, torch.arange(5, 10), (0,)))
    assert not torch.equal(first, sampler(maskable, torch.arange(5), (1,)))
    assert len({tuple(row.flatten().tolist()) for row in first}) == 5


@every_sampler
def test_the_global_generator_is_neither_read_nor_moved(sampler: Sampler) -> None:
    maskable, seeds = _maskable(), torch.arange(5)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = sampler(maskable, seeds, ())
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(sampler(maskable, seeds, ()), first)


@every_sampler
def test_a_response_of_one_token_or_none_is_no_problem(sampler: Sampler) -> None:
    maskable = torch.tensor([[False, True, False], [False, False, False]])
    hidden = sampler(maskable, torch.arange(2), ())
    assert not (hidden & ~maskable[:, None]).any()


def test_the_l_form_hides_exactly_l_tokens_and_every_l_is_equally_likely() -> None:
    maskable = _maskable(4000, 12, 2, 2)
    mask, level = draw_counts(maskable, torch.arange(4000))
    counts = mask.sum(-1)
    torch.testing.assert_close(level, counts / 8)
    assert counts.min() == 1
    assert _chi_square(torch.bincount(counts.flatten(), minlength=9)[1:]) < _limit(8)


def test_the_l_form_hides_every_set_of_a_size_equally_often() -> None:
    maskable = torch.ones(6000, 4, dtype=torch.bool)
    mask, _ = draw_counts(maskable, torch.arange(6000))
    pairs = mask[:, 0][mask.sum(-1)[:, 0] == 2]
    codes = (pairs * torch.tensor([1, 2, 4, 8])).sum(-1)
    observed = torch.bincount(codes, minlength=16)
    assert _chi_square(observed[observed > 0]) < _limit(6)
    assert (observed > 0).sum() == 6


@pytest.mark.parametrize("stratified", [False, True])
def test_times_are_uniform(stratified: bool) -> None:
    _, level = draw_times(_maskable(2000), torch.arange(2000), rows=2, eps=0.0, stratified=stratified)
    for row in level.T:
        observed = torch.histc(row, bins=10, min=0, max=1)
        assert _chi_square(observed) < _limit(10)


def test_stratified_counts_are_uniform_in_every_row_and_spread_within_a_sample() -> None:
    maskable = _maskable(4000, 12, 2, 2)
    mask, _ = draw_counts(maskable, torch.arange(4000), rows=4, stratified=True)
    counts = mask.sum(-1)
    for row in counts.T:
        assert _chi_square(torch.bincount(row, minlength=9)[1:]) < _limit(8)
    gaps = counts.sort(-1).values.diff(dim=-1)
    assert torch.equal(gaps, torch.full_like(gaps, 2))  # 8 levels in 4 rows


def test_the_t_form_hides_tokens_with_its_probability() -> None:
    maskable = torch.ones(2000, 20, dtype=torch.bool)
    mask = draw_at_times(maskable, torch.arange(2000), torch.full((2000, 1), 0.3), eps=0.0).mask
    assert mask.double().mean() == pytest.approx(0.3, abs=0.01)
    assert mask.double().mean(0).max() < 0.36


def test_the_ratio_stays_inside_its_range_and_fills_it() -> None:
    _, level = draw_times(_maskable(2000), torch.arange(2000), low=0.2, high=0.8, eps=0.0)
    assert 0.2 <= level.min() < 0.21
    assert 0.79 < level.max() <= 0.8


def test_a_pair_is_disjoint_and_covers_the_response() -> None:
    maskable = _maskable(3000, 12, 2, 2)
    drawn, rest = draw_pairs(maskable, torch.arange(3000))
    assert not (drawn.mask & rest.mask).any()
    assert torch.equal(drawn.mask | rest.mask, maskable[:, None])
    counts = drawn.mask.sum(-1)
    torch.testing.assert_close(drawn.level, counts / 9)
    torch.testing.assert_close(rest.level, 8 / 9 - drawn.level)
    assert _chi_square(torch.bincount(counts.flatten(), minlength=9)) < _limit(9)


def test_coupled_rows_are_everything_a_part_and_its_rest() -> None:
    maskable = _maskable()
    masks = coupled_masks(draw_times(maskable, torch.arange(5), low=0.2, high=0.8, eps=0.0), maskable)
    everything, part, rest = masks.mask.unbind(1)
    assert torch.equal(everything, maskable)
    assert not (part & rest).any()
    assert torch.equal(part | rest, maskable)
    torch.testing.assert_close(masks.level[:, 1] + masks.level[:, 2], torch.ones(5))


def test_the_prompt_is_hidden_with_its_probability_from_a_stream_of_its_own() -> None:
    tokens = torch.ones(3000, 20, dtype=torch.bool)
    hidden = draw_prompt(tokens, torch.arange(3000), probability=0.15)
    assert hidden.double().mean() == pytest.approx(0.15, abs=0.005)
    same_level = draw_at_times(tokens, torch.arange(3000), torch.full((3000, 1), 0.15), eps=0.0).mask[:, 0]
    both = (hidden & same_level).double().mean()
    assert both == pytest.approx(0.15**2, abs=0.004)


def test_stratified_formulas_by_hand() -> None:
    torch.testing.assert_close(stratified_times(torch.tensor([0.5]), 4), torch.tensor([[0.5, 0.75, 0.0, 0.25]]))
    assert stratified_counts(torch.tensor([5]), torch.tensor([8]), 4).tolist() == [[5, 7, 1, 3]]
    assert stratified_counts(torch.tensor([1]), torch.tensor([1]), 3).tolist() == [[1, 1, 1]]
    assert float(mask_probability(torch.tensor(0.0))) == pytest.approx(1e-3)


def test_the_lowest_numbers_are_hidden_even_among_ties() -> None:
    uniform = torch.tensor([[[0.1, 0.5, 0.2, 0.2, 0.2]]])
    maskable = torch.tensor([[False, True, True, True, True]])
    assert mask_lowest(uniform, maskable, torch.tensor([[2]])).tolist() == [[[False, False, True, True, False]]]


@pytest.mark.parametrize(
    ("ids", "mask", "expected"),
    [
        ([5, 5, 9, 9, 9], [0, 1, 1, 0, 0], [0, 1, 1, 1, 1]),
        ([5, 5, 9, 9, 9], [0, 1, 0, 1, 1], [0, 1, 0, 0, 0]),
        ([5, 9, 5, 9, 9], [0, 1, 0, 0, 1], [0, 1, 0, 0, 0]),
        ([5, 5, 5, 5, 5], [0, 1, 0, 1, 0], [0, 1, 0, 1, 0]),
        ([9, 9, 9, 9, 9], [0, 1, 0, 1, 0], [0, 1, 1, 1, 1]),
    ],
    ids=["hidden", "kept", "an_end_token_inside", "no_end_token", "nothing_else"],
)
def test_the_closing_run_of_end_tokens_follows_its_first(ids: Any, mask: Any, expected: Any) -> None:
    maskable = torch.tensor([[False, True, True, True, True]])
    got = tie_trailing_eos(torch.tensor([[mask]]).bool(), torch.tensor([ids]), maskable, eos_token_id=9)
    assert got.int().tolist() == [[expected]]


def test_the_closing_run_ends_before_padding() -> None:
    maskable = torch.tensor([[True, True, True, False]])
    mask = torch.tensor([[[False, True, False, False]]])
    got = tie_trailing_eos(mask, torch.tensor([[5, 9, 9, 0]]), maskable, eos_token_id=9)
    assert got.int().tolist() == [[[0, 1, 1, 0]]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, s: draw_times(m, s, low=0.8, high=0.2), r"\[0\.8, 0\.2\].*ordered"),
        (lambda m, s: draw_times(m, s, high=1.5), r"ordered inside \[0, 1\]"),
        (lambda m, s: draw_times(m, s, eps=1.0), "eps=1.0"),
        (lambda m, s: draw_counts(m, s, rows=0), "at least 1"),
        (lambda m, s: draw_prompt(m, s, probability=15), "probability 15"),
    ],
)
def test_settings_out_of_range_are_refused(call: Callable[[Tensor, Tensor], Masks], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(_maskable(), torch.arange(5))
