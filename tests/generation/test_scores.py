from __future__ import annotations

import json
import math

import pytest
import torch

from dare_lightning.generation.sampling import TokenSampler, chosen_log_probs
from dare_lightning.generation.schedule import Place, best_positions
from dare_lightning.generation.scores import (
    Confidence,
    DeferredEnds,
    EndRejection,
    EndsLast,
    Margin,
    NegativeEntropy,
    RandomOrder,
    perturbed,
)
from tests.shared import golden_files


def place(step: int, first_step: int = 0, steps: int = 8) -> Place:
    return Place(*(torch.tensor([n]) for n in (0, step, steps, first_step)))


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


def test_deferred_end_tokens_come_after_proposals_of_any_entropy():
    logits = torch.zeros(2, 40)  # 3.7 nats
    score = DeferredEnds(NegativeEntropy(), (1, 2)).score(logits, torch.tensor([1, 0]), None)
    assert score[0] < score[1]
    assert EndsLast().adjust(score[None], torch.tensor([[True, False]]), place(0), 8).argmax() == 1


def test_deferred_end_tokens_come_last_in_a_drawn_order():
    score = DeferredEnds(Confidence(), (1,)).score(torch.zeros(2, 4), torch.tensor([1, 0]), None).expand(1000, -1)
    uniform = torch.rand(1000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    noisy = perturbed(score, 5.0, uniform)
    assert bool((noisy[:, 0] < noisy[:, 1]).all())
    assert bool(noisy.isfinite().all())


@pytest.mark.parametrize("path", golden_files("generation/units-masked.json"))
def test_scores_are_the_published_ones(path):
    unit = json.loads(path.read_text())["dream_sample_tokens"]
    logits = torch.tensor(unit["logits"])
    for case in unit["cases"]:
        args = case["args"]
        sampler = TokenSampler(0.0, args.get("top_p"), args.get("top_k"))
        distribution = sampler.distribution(logits, mask_token_id=2)
        tokens = sampler.draw(distribution, 2, None)
        score = Margin() if args.get("margin_confidence") else Confidence()
        score = NegativeEntropy() if args.get("neg_entropy") else score
        assert tokens.tolist() == case["x0"]
        expected = torch.tensor(case["confidence"])
        torch.testing.assert_close(score.score(distribution, tokens, None), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("path", golden_files("generation/units-masked.json"))
def test_the_confidence_of_end_tokens_grows_as_published(path):
    unit = json.loads(path.read_text())["eoser_confidence"]
    logits, tokens = torch.tensor(unit["logits"]), torch.tensor(unit["x0"])
    clean = logits.softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    for name, ramp in (("sampling", "linear"), ("ass_sampling", "doubling")):
        for case in unit[name]:
            rejection = EndRejection(case["eos_min_gamma"], 1.0, ramp)
            found = rejection.adjust(clean, tokens == unit["eos_id"], place(case["step"]), case["total_steps"])
            torch.testing.assert_close(found, torch.tensor(case["confidence"]), rtol=0, atol=1e-5)


def test_rejection_counts_the_steps_of_the_whole_response_unless_told_otherwise():
    later = place(step=1, first_step=4, steps=4)
    assert EndRejection(0.0).factor(later, 8).item() == pytest.approx(5 / 7)
    assert EndRejection(0.0, within_block=True).factor(later, 8).item() == pytest.approx(1 / 7)
    assert EndRejection(0.0).factor(place(3, 4, 4), 8).item() == 1.0
    assert EndRejection(0.2).factor(place(0), 1).item() == 1.0


def test_a_doubling_factor_is_defined_for_any_number_of_steps():
    late, last = (EndRejection(0.2, ramp="doubling").factor(place(step), 2000).item() for step in (1000, 1999))
    assert (late, last) == (pytest.approx(0.2), pytest.approx(1.0))


def test_only_end_tokens_lose_their_confidence():
    score, ends = torch.tensor([[0.9, 0.5]]), torch.tensor([[True, False]])
    assert EndsLast().adjust(score, ends, place(0), 8).tolist() == [[0.0, 0.5]]
    assert EndRejection(0.5).adjust(score, ends, place(0), 8).tolist() == [[pytest.approx(0.45), 0.5]]


def test_a_perturbed_order_is_drawn_from_the_softmax_of_the_scores():
    count, temperature = 20_000, 0.5
    score = torch.tensor([0.9, 0.2, 0.5]).expand(count, -1)
    uniform = torch.rand(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    uniform[0, 0] = 0.0
    noisy = perturbed(score, temperature, uniform)
    assert not bool(noisy.isnan().any())
    first = best_positions(noisy, torch.ones(count, 3, dtype=torch.bool), torch.ones(count, dtype=torch.int64))
    expected = (torch.tensor([0.9, 0.2, 0.5]) / temperature).softmax(-1) * count
    assert ((first.sum(0) - expected) ** 2 / expected).sum() < 13.8  # 99.9 % quantile at 2 degrees of freedom


@pytest.mark.parametrize("bounds", [(-0.1, 1.0), (0.5, 0.4), (0.1, 1.1), (math.nan, 1.0)])
def test_factors_out_of_order_are_refused(bounds):
    with pytest.raises(ValueError, match=r"factors must be ordered inside \[0, 1\]"):
        EndRejection(*bounds)


def test_an_unknown_ramp_is_refused():
    with pytest.raises(ValueError, match="ramp='steep' is not one of linear, doubling"):
        EndRejection(ramp="steep")
