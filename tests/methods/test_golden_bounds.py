"""Loss and gradient of the methods on a bound of the likelihood against the recorded implementations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dare_lightning.diffusion.corruption import Masks
from dare_lightning.diffusion.likelihood import elbo, row_sums
from dare_lightning.diffusion.rows import Rows
from dare_lightning.methods.bgpo import BGPO
from dare_lightning.methods.ebpo import EBPO
from dare_lightning.methods.elbo_rows import elbo_rows
from dare_lightning.methods.espo import ESPO
from dare_lightning.methods.sequence import divisors
from dare_lightning.methods.spg import SPG
from dare_lightning.methods.vrpo import VRPO
from dare_lightning.replay.batch import SequenceBatch
from tests.methods.harness import build, run, with_old
from tests.methods.table_model import TablePolicy, golden, sequence_batch
from tests.shared import golden_files


class Case(NamedTuple):
    """A recorded case: its file, the method, and the rows and batch it was recorded on."""

    file: dict[str, Any]
    module: Any
    rows: Rows
    batch: SequenceBatch

    def policy(self, table: str) -> TablePolicy:
        return TablePolicy(self.file["model"], table, self.file["config"].get("block_size"))

    def draws(self, table: str) -> Tensor:
        """`log_likelihood` under one of the three policies."""
        scored = self.module.frozen_log_probs(self.policy(table), self.rows, self.batch)
        return self.module.log_likelihood(scored, self.rows, self.batch)


def _double(value: Any) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _bool(value: Any) -> Tensor:
    return torch.tensor(value).bool()


def _batch(case: dict[str, Any]) -> SequenceBatch:
    inputs = case["inputs"]
    start = inputs["prompt_length"]
    columns: dict[str, Any] = {"block_origin": case["config"].get("block_origin", "global")}
    if "advantages" in inputs:
        columns["advantage"] = _double(inputs["advantages"])
    counted = inputs.get("loss_mask", inputs.get("completion_mask"))
    if counted is not None:
        columns["completion_mask"] = torch.nn.functional.pad(_bool(counted), (start, 0))
    batch: SequenceBatch = sequence_batch(inputs["input_ids"], start, inputs.get("attention_mask"), **columns)
    return batch


def _with_policies(case: Case) -> Case:
    ref = case.policy("W_ref") if case.module.kl_coef > 0 else None
    return case._replace(batch=with_old(case.module, case.rows, case.batch, case.policy("W_old"), ref))


def _elbo_rows(case: dict[str, Any], batch: SequenceBatch, policy: TablePolicy) -> Rows:
    """The rows of the recorded masks and levels, one level a row or a token."""
    level = _double(case["inputs"]["p_mask"])
    mask = _bool(case["inputs"]["mask_indices"])
    return elbo_rows(policy, batch, mask, level if level.ndim == 3 else level[..., None])


def _built(path: Path, method: Any, **settings: Any) -> Case:
    file = golden(path)
    config, batch = file["config"], _batch(file)
    policy = TablePolicy(file["model"], "W", config.get("block_size"))
    clip = config.get("clip_eps")
    if "clip_low" in config or clip is not None:
        settings = {
            "clip_low": config.get("clip_low", clip),
            "clip_high": config.get("clip_high", clip),
            "dual_clip": config.get("dual_clip"),
            "kl_coef": config.get("kl_coef", 0.0),
        } | settings
    return Case(file, build(method, policy, **settings), _elbo_rows(file, batch, policy), batch)


def _bgpo(path: Path, **more: Any) -> Case:
    config = golden(path)["config"]
    padded = config["length_normaliser"].startswith("padded")
    divisor = float(len(golden(path)["inputs"]["loss_mask"][0])) if padded else None
    return _with_policies(_built(path, BGPO, samples=config["n_mc"], length_divisor=divisor, **more))


def _ebpo(path: Path, **more: Any) -> Case:
    config = golden(path)["config"]
    settings = {"samples": config["n_timesteps"], "timestep_weights": config["timestep_weights"]}
    return _with_policies(_built(path, EBPO, length_divisor=1.0, kl_kind=config["kl_estimator"], **settings, **more))


def _espo(path: Path, **more: Any) -> Case:
    config = golden(path)["config"]
    paired = config["reduce_var"]
    case = _built(path, ESPO, samples=config["n_mc"] * (2 if paired else 1), complement=paired, **more)
    return _with_policies(case._replace(rows=_pair_rows(case.module, case.file, case.batch)))


def _pair_rows(module: ESPO, file: dict[str, Any], batch: SequenceBatch) -> Rows:
    mask, level = _bool(file["inputs"]["mask_indices"]), _double(file["inputs"]["p_mask"])
    if mask.ndim == 2:
        mask, level = mask[:, None], level[:, None]
    length = batch.response_mask.sum(-1, keepdim=True)
    rest = Masks(batch.response_mask[:, None] & ~mask, length / (length + 1.0).double() - level)
    return module.rows(Masks(mask, level), rest, batch)


def _spg(path: Path, **more: Any) -> Case:
    file = golden(path)
    config, batch = file["config"], _batch(file)
    settings = {
        "samples": config["num_t"],
        "upper": config["logp_estimation"],
        "mix": config["mix_weight"],
        "eubo_beta": config["eubo_beta"],
        "forward_type": config.get("forward_type", "block_random"),
        "block_length": config["block_length"],
    }
    module = build(SPG, TablePolicy(file["model"]), **settings, **more)
    mask = _bool(file["inputs"]["mask_indices"]) & batch.attention_mask[:, None]
    return Case(file, module, module.rows(Masks(mask, torch.ones(mask.shape[:2])), batch), batch)


def _vrpo(path: Path, **more: Any) -> Case:
    file = golden(path)
    config = file["config"]
    case = _built(path, VRPO, samples=config["n_mc"], beta=config["beta"], **more)
    order = torch.arange(len(case.batch))
    batch = replace(case.batch, group_index=order // 2, reward=1.0 - order % 2)
    case = case._replace(batch=batch)
    ref = case.module.frozen_log_probs(case.policy("W_ref"), case.rows, batch)[:, None]
    return case._replace(batch=replace(batch, ref_log_probs=ref))


BUILDERS: dict[str, Any] = {"bgpo": _bgpo, "ebpo": _ebpo, "espo": _espo, "spg": _spg}
ONLINE = [case for name in BUILDERS for case in golden_files(f"algorithms/{name}_*.json")]
PREFERENCES = golden_files("algorithms/vrpo_*.json")


def _case(path: Path, **more: Any) -> Case:
    built: Case = BUILDERS[path.stem.split("_")[0]](path, **more)
    return built


def _assert_recorded(case: Case) -> None:
    outcome, outputs, tolerance = run(case.module, case.rows, case.batch), case.file["outputs"], case.file["tolerance"]
    torch.testing.assert_close(outcome.loss, _double(outputs["loss"]), **tolerance)
    torch.testing.assert_close(outcome.gradient, _double(outputs["grad_W"]), **tolerance)


@pytest.mark.parametrize("plan", ["single", "replay"])
@pytest.mark.parametrize("path", ONLINE)
def test_loss_and_gradient_are_the_recorded_ones(path: Path, plan: Any) -> None:
    _assert_recorded(_case(path, gradient_plan=plan, rows_per_forward=1))


@pytest.mark.parametrize("rows_per_forward", [1, 2])
@pytest.mark.parametrize("path", golden_files("algorithms/bgpo_*.json"))
def test_bgpo_with_the_memory_of_one_row_is_the_recorded_one(path: Path, rows_per_forward: int) -> None:
    _assert_recorded(_bgpo(path, gradient_plan="accumulate", rows_per_forward=rows_per_forward))


@pytest.mark.parametrize("path", [*ONLINE, *PREFERENCES])
def test_the_rows_hide_what_the_recorded_ones_hide(path: Path) -> None:
    case = _vrpo(path) if path.stem.startswith("vrpo") else _case(path)
    noisy = torch.tensor(case.file["inputs"]["noisy_input_ids"])
    rows = case.rows.noisy_ids[:, :: 2 if isinstance(case.module, ESPO) and case.module.complement else 1]
    exists = case.batch.attention_mask[:, None].expand_as(noisy)
    assert torch.equal(rows[exists], noisy[exists])


@pytest.mark.parametrize("path", ONLINE)
def test_sequence_estimates_of_all_policies_are_the_recorded_ones(path: Path) -> None:
    case = _case(path)
    outputs, tolerance = case.file["outputs"], case.file["tolerance"]
    compared = 0
    for name, table in (("policy", "W"), ("old", "W_old"), ("ref", "W_ref")):
        if f"{name}_elbo" in outputs:
            estimate = case.module.estimate(case.draws(table))
            torch.testing.assert_close(estimate, _double(outputs[f"{name}_elbo"]), **tolerance, msg=name)
            compared += 1
        if f"{name}_elbo_per_sample" in outputs:
            recorded = _double(outputs[f"{name}_elbo_per_sample"])
            torch.testing.assert_close(case.draws(table), recorded, **tolerance, msg=name)
            compared += 1
    if "per_sequence_logp" in outputs:
        value, _ = case.module.bound(case.draws("W"), case.rows, case.batch)
        torch.testing.assert_close(value, _double(outputs["per_sequence_logp"]), **tolerance)
        compared += 1
    assert compared


@pytest.mark.parametrize("path", golden_files("algorithms/bgpo_*.json"))
def test_surrogate_ratios_and_losses_of_the_rows_are_the_recorded_ones(path: Path) -> None:
    from dare_lightning.diffusion.bounds import boundary_ratio

    case = _bgpo(path)
    outputs, tolerance = case.file["outputs"], case.file["tolerance"]
    divisor = divisors(case.batch.completion_mask, case.module.length_divisor)[:, None]
    assert case.batch.advantage is not None
    ratio = boundary_ratio((case.draws("W") - case.draws("W_old")) / divisor, case.batch.advantage[:, None])
    if "surrogate_ratio_unclipped" in outputs:
        torch.testing.assert_close(ratio, _double(outputs["surrogate_ratio_unclipped"]), **tolerance)
    old = case.batch.old_log_probs
    assert old is not None
    losses = []
    for n in range(case.rows.count):
        alone = replace(case.batch, old_log_probs=old[:, :, n : n + 1])
        losses.append(run(case.module, case.rows.select(slice(n, n + 1)), alone).loss * case.rows.count)
    torch.testing.assert_close(torch.stack(losses), _double(outputs["loss_per_mc"]), **tolerance)


@pytest.mark.parametrize("path", golden_files("algorithms/ebpo_*.json"))
def test_clip_fraction_and_divergence_are_the_recorded_ones(path: Path) -> None:
    case = _ebpo(path)
    outputs, config = case.file["outputs"], case.file["config"]
    outcome = run(case.module, case.rows, case.batch)
    assert outcome.metrics["clip_fraction"] == pytest.approx(outputs["clip_fraction"])
    ratio = (case.module.estimate(case.draws("W")) - case.module.estimate(case.draws("W_old"))).exp()
    torch.testing.assert_close(ratio, _double(outputs["ratio"]), **case.file["tolerance"])
    if config["kl_coef"] > 0:
        assert outcome.metrics["kl"] == pytest.approx(outputs["kl_loss"], rel=1e-9)
        pure = outcome.loss - config["kl_coef"] * outcome.metrics["kl"]
        torch.testing.assert_close(pure, _double(outputs["pg_loss"]), **case.file["tolerance"])
    start = case.file["inputs"]["prompt_length"]
    scored = case.module.frozen_log_probs(case.policy("W"), case.rows, case.batch)
    tokens = (scored * case.rows.weight)[..., start:]
    torch.testing.assert_close(tokens, _double(outputs["policy_token_elbo"]), **case.file["tolerance"])


@pytest.mark.parametrize("path", golden_files("algorithms/elbo_espo_*.json"))
def test_the_elbo_of_a_pair_and_its_gradient_are_the_recorded_ones(path: Path) -> None:
    file = golden(path)
    paired, batch, policy = file["config"]["reduce_var"], _batch(file), TablePolicy(file["model"])
    module = build(ESPO, policy, samples=2 if paired else 1, complement=paired)
    rows = _pair_rows(module, file, batch)
    value = module.estimate(module.log_likelihood(module.row_log_probs(policy, rows, batch), rows, batch))
    torch.testing.assert_close(value.detach(), _double(file["outputs"]["elbo"]), **file["tolerance"])
    (gradient,) = torch.autograd.grad(value.sum(), policy.W)
    torch.testing.assert_close(gradient, _double(file["outputs"]["grad_W_of_sum"]), **file["tolerance"])


@pytest.mark.parametrize("plan", ["single", "replay"])
@pytest.mark.parametrize("raw", [True, False], ids=["raw", "length_normalised"])
@pytest.mark.parametrize("path", PREFERENCES)
def test_preference_loss_and_gradient_are_the_recorded_ones(path: Path, raw: bool, plan: str) -> None:
    divisor = 1.0 if raw else float(golden(path)["outputs"]["length_normaliser"])
    case = _vrpo(path, length_divisor=divisor, gradient_plan=plan, rows_per_forward=1)
    loss, gradient = ("raw_elbo", "raw_elbo") if raw else ("dare_length_normalised", "dare")
    outcome, outputs = run(case.module, case.rows, case.batch), case.file["outputs"]
    torch.testing.assert_close(outcome.loss, _double(outputs[f"loss_{loss}"]), **case.file["tolerance"])
    torch.testing.assert_close(outcome.gradient, _double(outputs[f"grad_W_{gradient}"]), **case.file["tolerance"])


@pytest.mark.parametrize("path", PREFERENCES)
def test_answer_likelihoods_of_policy_and_reference_are_the_recorded_ones(path: Path) -> None:
    case = _vrpo(path)
    for name, table in (("policy", "W"), ("ref", "W_ref")):
        draws = case.draws(table)
        recorded = _double(case.file["outputs"][f"{name}_elbo_per_sample"])
        torch.testing.assert_close(draws, recorded, **case.file["tolerance"], msg=name)
        scored = case.module.frozen_log_probs(case.policy(table), case.rows, case.batch)
        torch.testing.assert_close(elbo(scored, case.rows.weight), _double(case.file["outputs"][f"{name}_elbo"]))
        assert torch.equal(draws, row_sums(scored, case.rows.weight))
