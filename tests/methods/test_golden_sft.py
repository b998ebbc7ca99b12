"""Loss and gradient of supervised fine-tuning against the recorded implementations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dare_lightning.diffusion.corruption import Masks, mask_below, tie_trailing_eos
from dare_lightning.methods.sft import SFT
from tests.methods.harness import Outcome, build, run
from tests.methods.table_model import TablePolicy, golden, sequence_batch
from tests.shared import golden_files

# Which settings reproduce which implementation; every mask probability p is the recorded t or p_mask.
SETTINGS: dict[str, dict[str, Any]] = {
    "mdlm_sft_llada_guidelines": {},
    "mdlm_sft_d1": {"normalization": "token"},
    "mdlm_sft_dllm_token": {"normalization": "token", "weight_eps": 1e-6},
    "mdlm_sft_dllm_token_shifted": {"normalization": "token", "weight_eps": 1e-6},
    "mdlm_sft_dllm_sequence": {"weight_eps": 1e-6},
    "mdlm_sft_dllm_batch": {"normalization": "batch", "weight_eps": 1e-6},
    "mdlm_sft_dare_llada": {"normalization": "masked_tokens"},
    "mdlm_sft_dare_dream": {"normalization": "masked_tokens"},
    "mdlm_sft_dare_dream_eos_tied": {"normalization": "masked_tokens", "tie_trailing_eos": True},
}


def _group(path: Path) -> str:
    return path.stem.rsplit("_case", 1)[0]


def _batch(inputs: dict[str, Any]) -> Any:
    if "labels" in inputs:
        trained = torch.tensor(inputs["labels"]) != -100
        return sequence_batch(inputs["input_ids"], trained.int().argmax(-1))
    return sequence_batch(inputs["input_ids"], torch.tensor(inputs["prompt_lengths"]))


def _outcome(case: dict[str, Any], settings: dict[str, Any], **more: Any) -> tuple[SFT, Any, Outcome]:
    inputs = case["inputs"]
    module = build(SFT, TablePolicy(case["model"]), **settings, **more)
    batch = _batch(inputs)
    mask = torch.tensor(inputs["mask_indices"]).bool()[:, None]
    level = torch.tensor(inputs.get("p_mask", inputs["t"]), dtype=torch.float64)[:, None]
    rows = module.rows(Masks(mask, level), batch)
    denominator = module.denominator(rows, batch)
    if settings.get("normalization") == "masked_tokens":
        denominator = denominator + 1e-8  # recorded with this added to the count
    return module, rows, run(module, rows, batch, denominator)


@pytest.mark.parametrize("path", golden_files("algorithms/mdlm_sft_*.json"))
def test_loss_and_gradient_are_the_recorded_ones(path: Path) -> None:
    case = golden(path)
    _, rows, outcome = _outcome(case, SETTINGS[_group(path)])
    assert torch.equal(rows.noisy_ids[:, 0], torch.tensor(case["inputs"]["noisy_input_ids"]))
    expected: dict[str, Tensor] = {k: torch.tensor(case["outputs"][k], dtype=torch.float64) for k in ("loss", "grad_W")}
    torch.testing.assert_close(outcome.loss, expected["loss"], **case["tolerance"])
    torch.testing.assert_close(outcome.gradient, expected["grad_W"], **case["tolerance"])


@pytest.mark.parametrize("path", golden_files("algorithms/mdlm_sft_llada_guidelines_*.json"))
def test_token_log_probs_are_the_recorded_ones(path: Path) -> None:
    case = golden(path)
    module, rows, _ = _outcome(case, {})
    scored = module.row_log_probs(module.policy, rows, _batch(case["inputs"]))[:, 0]
    recorded = torch.tensor(case["outputs"]["token_logps"], dtype=torch.float64)
    hidden = rows.score_mask[:, 0]
    torch.testing.assert_close(scored[hidden], recorded[hidden], **case["tolerance"])


@pytest.mark.parametrize("path", golden_files("algorithms/mdlm_sft_*.json"))
def test_the_recorded_draws_give_the_recorded_masks(path: Path) -> None:
    inputs = golden(path)["inputs"]
    batch = _batch(inputs)
    mask = torch.tensor(inputs["mask_indices"]).bool()
    if "uniform" in inputs:
        uniform = torch.tensor(inputs["uniform"], dtype=torch.float64)[:, None]
        level = torch.tensor(inputs.get("p_mask", inputs["t"]), dtype=torch.float64)[:, None]
        assert torch.equal(mask_below(uniform, batch.response_mask, level)[:, 0], mask)
    if "eos_tied" in path.stem:
        tied = tie_trailing_eos(mask[:, None], batch.ids, batch.response_mask, golden(path)["model"]["eos_id"])
        assert torch.equal(tied[:, 0], mask)


@pytest.mark.parametrize("plan", ["accumulate", "replay"])
@pytest.mark.parametrize("path", golden_files("algorithms/mdlm_sft_*.json"))
def test_every_gradient_plan_gives_the_recorded_gradient(path: Path, plan: str) -> None:
    case = golden(path)
    _, _, outcome = _outcome(case, SETTINGS[_group(path)], gradient_plan=plan)
    expected = torch.tensor(case["outputs"]["grad_W"], dtype=torch.float64)
    torch.testing.assert_close(outcome.gradient, expected, **case["tolerance"])
