"""What all methods report under the same names."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dare_lightning.diffusion.diagnostics import EntropySum
from dare_lightning.families import base
from dare_lightning.methods import step_metrics
from dare_lightning.methods.bgpo import BGPO
from dare_lightning.methods.cj_grpo import CJGRPO
from dare_lightning.methods.d1 import D1
from dare_lightning.methods.espo import ESPO
from dare_lightning.methods.sft import SFT
from dare_lightning.methods.step_metrics import StepMetrics
from tests.methods.table_model import sequence_batch
from tests.tiny import tiny_llada

SGD = partial(torch.optim.SGD, lr=0.1)
IDS = [[5, 6, 7, 8, 9, 10], [5, 6, 8, 7, 10, 9], [5, 6, 9, 9, 7, 7]]


def measured(module: Any, **columns: Any) -> dict[str, tuple[Tensor, Tensor]]:
    batch = sequence_batch(IDS, 2, **columns)
    rows = module.corrupt(batch)
    loss, metrics = module.loss_and_metrics(rows, replace(batch, denominator=module.denominator(rows, batch)))
    loss.backward()
    return metrics


def quotient(pair: tuple[Tensor, Tensor]) -> float:
    return float(pair[0] / pair[1])


@pytest.mark.parametrize("plan", ["single", "accumulate", "replay"])
def test_entropy_is_that_of_the_policy_at_every_scored_position(plan: Any) -> None:
    policy = tiny_llada(dtype=torch.float64)
    module = SFT(policy, SGD, samples=3, temperature=0.7, gradient_plan=plan, rows_per_forward=1)
    batch = sequence_batch(IDS, 2)
    rows = module.corrupt(batch)
    logits = policy(rows.noisy_ids.flatten(0, 1)) / 0.7
    expected = torch.distributions.Categorical(logits=logits).entropy()[rows.score_mask.flatten(0, 1)]
    total, count = measured(module)["entropy"]
    assert count == rows.score_mask.sum()
    torch.testing.assert_close(total, expected.sum().detach())


def test_entropy_is_the_same_in_pieces_and_has_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, targets = tiny_llada(), torch.tensor([5, 6, 7, 8, 9])
    hidden = policy.hidden_states(targets[None])[0].detach().requires_grad_()
    whole, pieces = EntropySum(), EntropySum()
    base.chosen_log_probs(policy, hidden, targets, entropy=whole).sum().backward()
    assert hidden.grad is not None
    gradient, hidden.grad = hidden.grad, None
    monkeypatch.setattr(base, "MAX_LOGITS", 80)
    scored = base.chosen_log_probs(policy, hidden, targets, entropy=pieces)
    found = pieces.metrics()["entropy"]
    scored.sum().backward()
    torch.testing.assert_close(found, whole.metrics()["entropy"])
    torch.testing.assert_close(hidden.grad, gradient)
    assert pieces.metrics()["entropy"] == found  # although the backward pass scored all again


def test_pieces_that_are_differentiated_one_by_one_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"advantage": torch.tensor([1.0, 0.5, -1.0])}
    settings: dict[str, Any] = {"samples": 4, "gradient_plan": "accumulate", "rows_per_forward": 1}
    whole = measured(BGPO(tiny_llada(), SGD, **settings), **columns)["entropy"]
    monkeypatch.setattr(base, "MAX_LOGITS", 80)  # two tokens a piece
    torch.testing.assert_close(measured(BGPO(tiny_llada(), SGD, **settings), **columns)["entropy"], whole)


def test_beside_a_fused_head_some_positions_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    # The kernel runs on a GPU alone; what it gives is that of the plain head.
    policy, targets = tiny_llada(), torch.arange(5, 17)
    hidden = policy.hidden_states(targets[None])[0].detach()
    plain = base.chosen_log_probs(policy, hidden, targets)
    monkeypatch.setattr(base, "fused_log_probs", lambda *arguments: plain)
    monkeypatch.setattr(base, "MAX_LOGITS", 5 * 40)
    entropy = EntropySum()
    assert base.chosen_log_probs(policy, hidden, targets, 0.5, entropy) is plain
    expected = torch.distributions.Categorical(logits=policy.logits(hidden[::3]) / 0.5).entropy()
    total, count = entropy.metrics()["entropy"]
    assert count == 4
    torch.testing.assert_close(total, expected.sum())


def test_the_entropy_of_a_sharp_policy_is_zero_and_of_a_flat_one_its_most() -> None:
    for scale, expected in ((1e4, 0.0), (0.0, torch.tensor(40.0).log())):
        entropy, logits = EntropySum(), scale * torch.eye(40)[:3]
        entropy.add(logits, logits.logsumexp(-1))
        assert quotient(entropy.metrics()["entropy"]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (D1, {}),
        (CJGRPO, {}),
        (ESPO, {}),
        (BGPO, {"samples": 4, "gradient_plan": "accumulate", "rows_per_forward": 1}),
    ],
)
def test_samples_that_are_not_run_are_left_out(method: Any, settings: dict[str, Any]) -> None:
    columns: dict[str, Any] = {"advantage": torch.tensor([1.0, 0.0, -1.0]), "group_index": torch.zeros(3).long()}
    columns["commit_step"] = torch.tensor([-1, -1, 0, 0, 1, 1]).expand(3, -1)
    module = method(tiny_llada(), SGD, **settings)
    metrics, every = measured(module, **columns), measured(module, **columns | {"advantage": torch.ones(3)})
    for name in ("ratio_mean", "old_kl", "clip_fraction", *({"estimator_std"} & metrics.keys())):
        assert 3 * metrics[name][1] == 2 * every[name][1], name
    assert quotient(metrics["ratio_mean"]) == pytest.approx(1)


def test_draws_that_are_differentiated_one_by_one_still_have_a_spread() -> None:
    columns = {"advantage": torch.tensor([1.0, 0.5, -1.0])}
    settings: dict[str, Any] = {"samples": 4}
    whole = measured(BGPO(tiny_llada(), SGD, **settings), **columns)["estimator_std"]
    settings |= {"gradient_plan": "accumulate", "rows_per_forward": 1}
    apart = measured(BGPO(tiny_llada(), SGD, **settings), **columns)["estimator_std"]
    torch.testing.assert_close(apart, whole)
    assert quotient(whole) > 0


def test_what_nothing_was_measured_on_is_not_reported() -> None:
    step = StepMetrics()
    nothing, one = torch.tensor(0.0), torch.tensor(1.0)
    step.note({"loss": (nothing, one), "ratio_mean": (nothing, nothing), "ratio_square_mean": (nothing, nothing)})
    assert step.values().keys() == {"loss"}


def test_ranks_that_measured_different_things_are_joined_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"kl": [3.0, 1.0], "loss": [1.0, 3.0]}
    monkeypatch.setattr(step_metrics, "gather_objects", lambda own: [own, other])
    step = StepMetrics()
    step.note({"loss": (torch.tensor(2.0), torch.tensor(1.0))})
    assert {name: float(value) for name, value in step.values().items()} == {"loss": 0.75, "kl": 3.0}
