"""Advantages, surrogate, aggregation and divergences against the recorded implementations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dare_lightning.diffusion.advantages import estimator, group_advantages
from dare_lightning.diffusion.losses import ClipRange, aggregate, clipped_policy_loss, kl_estimate
from tests.methods.table_model import golden
from tests.shared import golden_files

ADVANTAGES = {
    "grpo_std": "grpo",
    "grpo_no_std": "no_std",
    "leave_one_out": "leave_one_out",
    "leave_one_out_std": "leave_one_out_std",
    "z_score": "z_score",
}
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum-norm": "sequence_sum_token_sum_norm",
}


def _double(value: Any) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize("recorded", ADVANTAGES)
@pytest.mark.parametrize("path", golden_files("algorithms/primitives_advantages_*.json"))
def test_advantages_are_the_recorded_ones(path: Path, recorded: str) -> None:
    case = golden(path)
    got = group_advantages(
        _double(case["inputs"]["rewards"]), torch.tensor(case["inputs"]["group_ids"]), estimator(ADVANTAGES[recorded])
    )
    torch.testing.assert_close(got.advantage, _double(case["outputs"][recorded]), **case["tolerance"])


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("path", golden_files("algorithms/primitives_ppo_kl_*.json"))
def test_surrogate_and_its_gradient_are_the_recorded_ones(path: Path, mode: str) -> None:
    case = golden(path)
    inputs, config = case["inputs"], case["config"]
    expected = case["outputs"]["policy_loss"][mode]
    logps = _double(inputs["logps"]).requires_grad_()
    mask = torch.tensor(inputs["loss_mask"]).bool()
    clip = ClipRange(config["clip_low"], config["clip_high"], config["dual_clip"])
    loss, metrics = clipped_policy_loss(
        logps, _double(inputs["old_logps"]), None, _double(inputs["advantages"]), mask, clip
    )
    canvas = torch.full((len(mask),), mask.shape[1])
    value = aggregate(loss, mask, AGGREGATIONS[mode], canvas)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(value, logps)
    # Recorded with 1e-8 added to the number of tokens, which shows in the ninth digit.
    tolerance: dict[str, Any] = {"rtol": 3e-9, "atol": 1e-10}
    torch.testing.assert_close(value.detach(), _double(expected["loss"]), **tolerance)
    torch.testing.assert_close(gradient, _double(expected["grad_logps"]), **tolerance)
    for name in ("clip_fraction", "dual_clip_fraction"):
        total, weight = metrics[name]
        assert float(total / (weight + 1e-8)) == pytest.approx(expected[name], rel=1e-9)


@pytest.mark.parametrize(
    ("recorded", "kind"), [("kl_k1", "k1"), ("kl_abs", "abs"), ("kl_k2", "k2"), ("kl_k3_clamped10", "k3")]
)
@pytest.mark.parametrize("path", golden_files("algorithms/primitives_ppo_kl_*.json"))
def test_divergences_are_the_recorded_ones(path: Path, recorded: str, kind: Any) -> None:
    case = golden(path)
    got = kl_estimate(kind, _double(case["inputs"]["logps"]), _double(case["inputs"]["ref_logps"]))
    torch.testing.assert_close(got, _double(case["outputs"][recorded]), **case["tolerance"])
