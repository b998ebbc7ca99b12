"""Supervised fine-tuning of block policies: recorded losses, levels for each block, complements, replaced tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dare_lightning.diffusion.corruption import Masks
from dare_lightning.families.tiny import new_tiny_llada, new_tiny_sdar
from dare_lightning.methods.sft import SFT
from tests.methods.harness import build, run
from tests.methods.table_model import TablePolicy, golden, sequence_batch
from tests.shared import golden_files
from tests.tiny import MASK

# Which settings reproduce which implementation.
SETTINGS: dict[str, dict[str, Any]] = {
    "bdlm_sft_dllm_bd3lm": {"normalization": "token", "weight_eps": 1e-6},
    "bdlm_sft_sdar": {"normalization": "token"},
    "bdlm_sft_llada2_dfactory": {"normalization": "masked_tokens", "weighting": "none", "levels": (0.3, 0.8)},
}


def recorded(path: Path) -> tuple[dict[str, Any], Any, Any]:
    """A golden case, its batch, and its rows under the settings that reproduce it."""
    case = golden(path)
    inputs, config = case["inputs"], case["config"]
    policy = TablePolicy(case["model"], block_length=config["block_size"], block_origin=config["block_origin"])
    module = build(SFT, policy, **SETTINGS[path.stem.rsplit("_case", 1)[0]])
    mask = torch.tensor(inputs["mask_indices"]).bool()
    start = (torch.tensor(inputs["labels"]) != -100).int().argmax(-1)
    exists = torch.tensor(inputs["attention_mask"]) if "attention_mask" in inputs else None
    batch = sequence_batch(inputs["input_ids"], start, exists, block_origin=config["block_origin"])
    level = torch.ones(len(mask), 1, dtype=torch.float64)
    if "t" in inputs:
        level = torch.tensor(inputs["t"], dtype=torch.float64).view(len(mask), 1)
    if "p_mask_at_masked" in inputs:
        level = torch.tensor(inputs["p_mask_at_masked"], dtype=torch.float64).amax(-1, keepdim=True)
    return case, batch, (module, module.rows(Masks(mask[:, None], level), batch))


@pytest.mark.parametrize("path", golden_files("algorithms/bdlm_sft_*.json"))
def test_loss_and_gradient_are_the_recorded_ones(path: Path) -> None:
    case, batch, (module, rows) = recorded(path)
    assert torch.equal(rows.noisy_ids[:, 0], torch.tensor(case["inputs"]["noisy_input_ids"]))
    outcome = run(module, rows, batch)
    for name, found in (("loss", outcome.loss), ("grad_W", outcome.gradient)):
        expected = torch.tensor(case["outputs"][name], dtype=torch.float64)
        torch.testing.assert_close(found, expected, **case["tolerance"])


@pytest.fixture(scope="module")
def policy() -> Any:
    return new_tiny_sdar(layers=1, width=16, heads=2).double()


def batch_of(rows: int = 2) -> Any:
    return sequence_batch(torch.randint(7, 60, (rows, 15), generator=torch.Generator().manual_seed(1)), 6)


def test_every_block_has_a_level_of_its_own_and_hides_that_share(policy: Any) -> None:
    batch = batch_of()
    rows = build(SFT, policy, level_scope="block", normalization="token", samples=3).corrupt(batch)
    blocks = batch.block_ids(4)
    for block, size in ((1, 2), (2, 4), (3, 3)):
        inside = (blocks == block) & batch.response_mask
        hidden = ((rows.noisy_ids == MASK) & inside[:, None]).sum(-1)
        assert (hidden >= 1).all()
        torch.testing.assert_close((rows.weight * inside[:, None]).sum(-1), torch.full((2, 3), float(size)))


def test_one_level_a_block_and_one_a_sequence_have_the_same_expectation(policy: Any) -> None:
    batch = batch_of(1).select(torch.zeros(400, dtype=torch.int64))
    batch = type(batch)(**(vars(batch) | {"noise_seed": torch.arange(400)}))
    means, errors = [], []
    with torch.no_grad():
        for scope in ("block", "sequence"):
            module = build(SFT, policy, level_scope=scope, eps=0.0)
            rows = module.corrupt(batch)
            values = module.log_likelihood(module.row_log_probs(policy, rows, batch), rows, batch)
            means.append(values.mean())
            errors.append(values.std() / 20)
    assert abs(means[0] - means[1]) < 4 * torch.stack(errors).norm()
    assert errors[0] < errors[1]


@pytest.mark.parametrize("scope", ["sequence", "block"])
def test_a_complement_teaches_every_token_once(policy: Any, scope: Any) -> None:
    batch = batch_of()
    settings = {"complement": True, "weighting": "none", "normalization": "masked_tokens", "levels": [0.3, 0.8]}
    module = build(SFT, policy, level_scope=scope, samples=2, **settings)
    rows = module.corrupt(batch)
    assert rows.count == 4
    assert torch.equal(rows.score_mask.sum(1), 2 * batch.response_mask.long())
    outcome = module.loss_and_metrics(rows, type(batch)(**(vars(batch) | {"denominator": module.count(batch)})))[0]
    scored = module.row_log_probs(policy, rows, batch)
    torch.testing.assert_close(outcome, -scored.sum() / rows.score_mask.sum())


def test_levels_stay_in_their_band(policy: Any) -> None:
    module = build(SFT, policy, levels=[0.5, 0.5], eps=0.0, samples=64)
    assert module.corrupt(batch_of()).level.unique().tolist() == [0.5]
    assert module.validation_rows(batch_of()).level.unique().tolist() == [0.5]
    counts = build(SFT, policy, levels=[0.5, 0.5], level_scope="block").corrupt(batch_of()).score_mask.sum(-1)
    assert counts.flatten().tolist() == [1 + 2 + 1] * 2


def test_replaced_tokens_are_wrong_visible_and_taught(policy: Any) -> None:
    batch = batch_of(8)
    settings = {"weighting": "none", "normalization": "masked_tokens", "levels": [0.3, 0.8]}
    plain, module = (build(SFT, policy, **settings, replaced=share) for share in (0.0, 0.4))
    rows, before = module.corrupt(batch), plain.corrupt(batch)
    replaced = rows.score_mask & ~before.score_mask
    assert 0.2 < replaced.sum() / (batch.response_mask[:, None] & ~before.score_mask).sum() < 0.6
    assert (rows.noisy_ids != MASK)[replaced].all()
    assert torch.equal(rows.noisy_ids[~replaced], before.noisy_ids[~replaced])
    assert (rows.noisy_ids[:, 0] != batch.ids)[replaced[:, 0]].float().mean() > 0.9
    assert module.row_log_probs(policy, rows, batch)[replaced].ne(0).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"level_scope": "token"}, "level_scope='token'"),
        ({"weighting": "sqrt"}, "weighting='sqrt'"),
        ({"levels": [0.8, 0.3]}, r"levels=\[0\.8, 0\.3\] is not ordered"),
        ({"replaced": 0.1}, "weighting=inverse has no weight for replaced tokens"),
        ({"level_scope": "block", "complement": True}, "complements of whole blocks"),
        ({"level_scope": "block", "tie_trailing_eos": True}, "tie_trailing_eos.*level_scope=sequence"),
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(policy: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(SFT, policy, **settings)


def test_a_level_for_each_block_needs_blocks() -> None:
    with pytest.raises(ValueError, match="is defined for block-diffusion policies, LLaDA has no blocks"):
        build(SFT, new_tiny_llada(layers=1, width=16, heads=2), level_scope="block")
