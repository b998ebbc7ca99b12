from __future__ import annotations

import pytest
import torch

from dare_lightning.generation.sampling import RowStreams, TokenSampler, chosen_log_probs, sample_tokens


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_tokens_follow_the_softmax_at_the_temperature(temperature):
    count = 20_000
    logits = torch.tensor([0.0, 1.0, -1.0, float("-inf"), 2.5, 0.3])
    uniform = RowStreams([11], 1).uniform(torch.tensor([0]), count)[0]
    drawn = sample_tokens(logits.expand(count, -1), temperature, uniform).bincount(minlength=6)
    expected = (logits.double() / temperature).softmax(-1) * count
    possible = expected > 0
    chi_square = ((drawn - expected) ** 2 / expected)[possible].sum()
    assert drawn[3] == 0
    assert chi_square < 18.5  # 99.9 % quantile at 4 degrees of freedom


def test_extreme_uniform_numbers_give_possible_tokens():
    logits = torch.tensor([float("-inf"), 0.0, 3.0, float("-inf")]).expand(2, -1)
    assert sample_tokens(logits, 1.0, torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64)).tolist() == [1, 2]


def test_a_draw_does_not_depend_on_tokens_added_at_the_end_of_the_vocabulary():
    logits = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    padded = torch.cat([logits, torch.full((50, 9), float("-inf"))], 1)
    uniform = torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(sample_tokens(logits, 0.8, uniform), sample_tokens(padded, 0.8, uniform))


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[5000.0, 5001.0, -5000.0]])
    assert sample_tokens(logits, 0.1, torch.tensor([0.5], dtype=torch.float64)).tolist() == [1]


def test_the_mask_token_is_never_taken_even_where_it_is_the_most_likely():
    logits = torch.tensor([[0.1, 9.0, 0.2, 0.3], [5.0, 9.0, 5.0, 4.0], [0.1, 0.2, 0.3, 0.1]])
    assert TokenSampler().draw(logits, 1, None).tolist() == [3, 0, 2]
    drawn = TokenSampler(1.0).draw(logits, 1, torch.full((3,), 0.9, dtype=torch.float64))
    assert 1 not in drawn.tolist()


def test_a_log_prob_holds_where_other_tokens_are_impossible():
    logits = torch.tensor([[1.0, 2.0, float("-inf"), -1e4]])
    expected = torch.tensor([1.0, 2.0]).log_softmax(0)[0]
    torch.testing.assert_close(chosen_log_probs(logits, torch.tensor([0])), expected[None])


def test_temperature_zero_takes_the_most_likely_token():
    assert sample_tokens(torch.tensor([[0.1, 0.7, 0.2]]), 0.0, None).tolist() == [1]


def test_sampling_without_uniform_numbers_is_an_error():
    with pytest.raises(ValueError, match="temperature=1.0 needs one uniform number"):
        sample_tokens(torch.zeros(1, 3), 1.0, None)


def test_a_row_draws_the_same_numbers_whoever_else_draws():
    together, alone = RowStreams([5, 6, 7], 1), RowStreams([6], 1)
    rows = torch.tensor([0, 1, 2])
    first = together.uniform(rows, 4)[1], together.uniform(rows[1:], 4)[0]
    second = alone.uniform(torch.tensor([0]), 4)[0], alone.uniform(torch.tensor([0]), 4)[0]
    assert torch.equal(torch.stack(first), torch.stack(second))


def test_streams_for_different_purposes_differ():
    row = torch.tensor([0])
    assert not torch.equal(RowStreams([5], 1).uniform(row, 4), RowStreams([5], 2).uniform(row, 4))


@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
def test_filters_keep_the_nucleus_of_the_tempered_distribution_and_then_the_most_likely(temperature):
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.5, -4.0]])
    tempered = logits / (temperature or 1.0)
    ordered = tempered.softmax(-1)[0].tolist()
    nucleus = next(size for size in range(1, 6) if sum(ordered[:size]) > 0.8)
    kept = TokenSampler(temperature, top_p=0.8).distribution(logits, 4).isfinite()[0]
    assert kept.tolist() == [place < nucleus for place in range(5)]
    both = TokenSampler(temperature, top_p=0.8, top_k=1).distribution(logits, 4)
    assert both[0].tolist() == [tempered[0, 0].item()] + [float("-inf")] * 4


def test_filters_that_would_leave_the_mask_token_alone_leave_the_best_other_too():
    logits = torch.tensor([[0.0, 1.0, 9.0]])
    sampler = TokenSampler(1.0, top_p=0.5, top_k=1)
    distribution = sampler.distribution(logits, 2)
    assert distribution.isfinite().tolist() == [[False, True, True]]
    assert sampler.draw(distribution, 2, torch.tensor([0.99], dtype=torch.float64)).tolist() == [1]


def test_without_settings_tokens_are_drawn_from_the_logits_themselves():
    logits = torch.randn(3, 5)
    for sampler in (TokenSampler(0.0), TokenSampler(1.0), TokenSampler(1.0, top_k=7)):
        assert torch.equal(sampler.distribution(logits, 4), logits)


def test_draws_follow_the_filtered_distribution():
    count = 20_000
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).expand(count, -1)
    sampler = TokenSampler(0.7, top_k=2)
    uniform = RowStreams([3], 1).uniform(torch.tensor([0]), count)[0]
    drawn = sampler.draw(sampler.distribution(logits, 3), 3, uniform).bincount(minlength=4)
    expected = (torch.tensor([2.0, 1.0]) / 0.7).softmax(-1) * count
    assert drawn[2:].sum() == 0
    assert ((drawn[:2] - expected) ** 2 / expected).sum() < 10.8  # 99.9 % quantile at 1 degree of freedom
