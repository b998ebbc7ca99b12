from __future__ import annotations

import pytest
import torch

from dare_lightning.generation.sampling import (
    Confidence,
    DeferredEnds,
    RandomOrder,
    RowStreams,
    chosen_log_probs,
    sample_tokens,
)


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


def test_confidence_is_the_probability_of_the_proposal():
    logits, tokens = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([1])
    expected = logits.softmax(-1)[:, 1]
    torch.testing.assert_close(Confidence().score(logits, tokens, None), expected)
    torch.testing.assert_close(chosen_log_probs(logits, tokens).exp(), expected)


@pytest.mark.parametrize("inner", [Confidence(), RandomOrder()], ids=["confidence", "random"])
def test_deferred_end_tokens_come_after_everything_else(inner):
    logits = torch.tensor([[0.0, 200.0, 0.0], [0.0, 0.0, 200.0]])
    tokens = torch.tensor([1, 0])  # a sure end token, and a token whose probability underflows to 0
    score = DeferredEnds(inner, (1, 2)).score(logits, tokens, torch.tensor([0.9, 0.0], dtype=torch.float64))
    assert score[0] < score[1]
