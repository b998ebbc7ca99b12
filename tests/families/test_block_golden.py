"""SDAR, SDAR-MoE, LLaDA2.0 and LLaDA2.1 against the numbers of the original code."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dare_lightning.families.attention import KeyValueCache, View
from dare_lightning.families.base import token_log_probs, using_attention
from dare_lightning.families.checkpoint import save_checkpoint
from dare_lightning.families.experts import RouterBalance, recorded_router_logits, split_experts
from dare_lightning.families.load import load_policy
from tests.shared import fixture_model, golden_files

ATOL = 2e-4
GOLDEN = golden_files("models/sdar*.json") + golden_files("models/llada2*.json")
KERNELS = ["eager", "sdpa", "flex"]  # varlen takes the way of sdpa where there are blocks


class Case(NamedTuple):
    """A golden file: the policy it is about, what it says, and its arrays (integers as int64)."""

    policy: Any
    said: dict[str, Any]
    arrays: dict[str, Tensor]


@cache
def read(path: Path) -> Case:
    said = json.loads(path.read_text())
    folder = fixture_model(path.stem)
    # Published LLaDA2 and SDAR-MoE configs do not say their block length; it must not be given where one does.
    known = "block_size" in json.loads((folder / "config.json").read_text())
    policy = load_policy(str(folder), **({} if known else {"block_length": said["block_length"]}))
    loaded = np.load(path.with_suffix(".npz"))
    arrays = {name: torch.from_numpy(loaded[name]) for name in loaded.files}
    return Case(policy, said, {n: a.long() if a.dtype == torch.int32 else a for n, a in arrays.items()})


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    return read(request.param)


def close(found: Tensor, expected: Tensor, atol: float = ATOL, rtol: float = 0.0) -> None:
    torch.testing.assert_close(found, expected.to(found.dtype), atol=atol, rtol=rtol)


@pytest.mark.parametrize("attention", KERNELS)
@pytest.mark.parametrize("case", GOLDEN, indirect=True)
@torch.no_grad()
def test_the_inference_pass_is_block_causal(case: Case, attention: str) -> None:
    policy, said, arrays = case
    assert policy.block_length == said["block_length"]
    with using_attention(policy, attention):
        for name in ("full", "batch", "partial_prompt"):
            close(policy(arrays[f"{name}.input_ids"]), arrays[f"{name}.logits"])
        try:
            policy.block_length = said["other_block_length"]
            close(policy(arrays["other_block.input_ids"]), arrays["other_block.logits"])
        finally:
            policy.block_length = said["block_length"]


@pytest.mark.parametrize("case", GOLDEN, indirect=True)
@torch.no_grad()
def test_a_cache_of_committed_blocks_gives_the_recorded_logits_keys_and_values(case: Case) -> None:
    policy, said, arrays = case
    size, clean = said["block_length"], arrays["cached.clean_ids"]
    cache_, row = KeyValueCache(1, 4 * size), torch.zeros(1, dtype=torch.int64)

    def logits(ids: Tensor, start: int) -> Tensor:
        columns = torch.arange(start, start + ids.shape[1])[None]
        visible = torch.arange(4 * size) // size <= (columns // size)[..., None]
        return policy.logits(policy.hidden_states(ids, None, View(columns, visible, cache_, row, columns)))

    close(logits(clean[:, : 2 * size], 0), arrays["cached.prefill_logits"])
    close(logits(arrays["cached.block2_noisy"], 2 * size), arrays["cached.denoise2_logits"])
    close(logits(clean[:, 2 * size : 3 * size], 2 * size), arrays["cached.commit2_logits"])
    close(logits(arrays["cached.block3_noisy"], 3 * size), arrays["cached.denoise3_logits"])
    keys, values = cache_.read(0, row)
    close(keys[:, :, : 3 * size], arrays["cached.key_layer0"])
    close(values[:, :, : 3 * size], arrays["cached.value_layer0"])


@pytest.mark.parametrize("attention", KERNELS)
@pytest.mark.parametrize("case", GOLDEN, indirect=True)
@torch.no_grad()
def test_the_training_pass_predicts_the_noisy_half(case: Case, attention: str) -> None:
    policy, _, arrays = case
    noisy = arrays["train.noisy_ids"]
    with using_attention(policy, attention):
        hidden = policy.denoise(noisy, arrays["train.clean_ids"])
    close(policy.logits(hidden), arrays["train.logits"][:, : noisy.shape[1]])


@pytest.mark.parametrize("case", GOLDEN, indirect=True)
def test_losses_and_the_gradient_of_every_tensor_are_the_recorded_ones(case: Case) -> None:
    policy, train, arrays = case.policy, case.said["train"], case.arrays
    clean, mask = arrays["train.clean_ids"], arrays["train.target_mask"].bool()
    policy.zero_grad()
    scored = token_log_probs(policy, arrays["train.noisy_ids"], clean, torch.ones_like(mask), mask)
    close(-scored[mask], arrays["train.token_nll"])
    losses = {
        "loss_weighted": -scored.sum() / train["p_mask"] / train["n_answer"],
        "loss_masked_mean": -scored.sum() / train["n_targets"],
    }
    for name, loss in losses.items():
        assert float(loss.detach()) == pytest.approx(train[name], rel=1e-4)
    losses[train["grad_loss"]].backward()
    gradients = split_experts({n: p.grad for n, p in policy.named_parameters() if p.grad is not None})
    found = {name: float(gradients[name].norm()) for name in train["grad_l2"]}
    assert found == pytest.approx(train["grad_l2"], rel=2e-4, abs=1e-4)
    close(policy.model.norm.weight.grad, arrays["train.grad_final_norm"], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("case", GOLDEN, indirect=True)
@torch.no_grad()
def test_packed_samples_and_padded_rows_are_scored_as_recorded(case: Case) -> None:
    policy, said, arrays = case
    if "packed" in said:
        mask, real = arrays["packed.target_mask"].bool(), sum(said["packed"]["lengths"])
        exists = torch.arange(mask.shape[1])[None] < real
        position = arrays["packed.position_ids"]
        # Numbers fall from sample to sample, whatever their lengths.
        later = (position == 0).flip(1).cumsum(1).flip(1) - (position == 0).long()
        block = (position // said["block_length"] + 100 * later).masked_fill(~exists, -1)
        noisy, clean = arrays["packed.noisy_ids"], arrays["packed.clean_ids"]
        logits = policy.logits(policy.denoise(noisy, clean, exists, block))
        close(logits[mask], arrays["packed.target_logits"])
        scored = token_log_probs(policy, noisy, clean, exists, mask, block_ids=block)[mask]
        close(-scored / arrays["packed.p_mask"][mask], arrays["packed.token_loss"], atol=1e-3)
    if "padded" in said:
        mask, exists = arrays["padded.target_mask"].bool(), arrays["padded.attention_mask"].bool()
        noisy, clean = arrays["padded.noisy_ids"], arrays["padded.clean_ids"]
        close(policy.logits(policy.denoise(noisy, clean, exists))[mask], arrays["padded.target_logits"])
        close(-token_log_probs(policy, noisy, clean, exists, mask)[mask], arrays["padded.token_nll"])


@pytest.mark.parametrize("case", GOLDEN, indirect=True)
def test_the_balancing_loss_of_the_routers_is_the_recorded_one(case: Case) -> None:
    if "aux_loss_full" not in case.said:
        pytest.skip("none was recorded")
    watch = RouterBalance(case.policy, 1.0)
    with watch.recording() as passes:
        case.policy(case.arrays["full.input_ids"])
    loss, _ = watch.added(torch.zeros(()), passes)
    assert loss.item() == pytest.approx(case.said["aux_loss_full"], rel=1e-5)


@pytest.mark.parametrize("case", GOLDEN, indirect=True)
@torch.no_grad()
def test_routers_choose_and_weigh_as_recorded(case: Case) -> None:
    policy, _, arrays = case
    with recorded_router_logits(policy) as records:
        policy(arrays["full.input_ids"])
    routed = [name for name in arrays if name.startswith("router.") and name.endswith("_logits")]
    assert len(routed) == len(records)
    modules = dict(policy.named_modules())
    for number, (name, (logits,)) in enumerate(records.items()):
        close(logits, arrays[f"router.layer{number}_logits"])
        mixture: Any = modules[name]
        router = mixture if isinstance(mixture.gate, nn.Linear) else mixture.gate
        weights, chosen = router.route(logits)
        assert torch.equal(chosen.sort(-1).values, arrays[f"router.layer{number}_topk_idx"].sort(-1).values)
        expected = arrays[f"router.layer{number}_topk_weight"].gather(
            1, arrays[f"router.layer{number}_topk_idx"].argsort(-1)
        )
        close(weights.gather(1, chosen.argsort(-1)), expected, atol=1e-5)


@pytest.mark.parametrize("case", GOLDEN, indirect=True)
def test_special_tokens_and_conversations_are_the_recorded_ones(case: Case) -> None:
    policy, said, _ = case
    reference = said["tokenizer"]
    assert policy.mask_token_id == said["mask_token_id"] == reference["mask"]
    assert policy.eos_token_id == said["eos_token_id"] == reference["eos"]
    assert policy.pad_token_id == reference["pad"]
    tokenizer = policy.tokenizer
    render = {"tokenize": False, "add_generation_prompt": True}
    assert tokenizer.apply_chat_template(reference["messages"], **render) == reference["prompt"]
    assert tokenizer(reference["prompt"], add_special_tokens=False)["input_ids"] == reference["ids"]
    turn = reference["full_turn"]
    assert tokenizer.apply_chat_template(turn["messages"], tokenize=False) == turn["text"]
    if "prompt_no_think" in reference:
        shown = tokenizer.apply_chat_template(reference["messages"], enable_thinking=False, **render)
        assert shown == reference["prompt_no_think"]


@pytest.mark.parametrize("limit", [10**9, 30_000], ids=["one_file", "sharded"])
@pytest.mark.parametrize("case", GOLDEN, indirect=True)
def test_reading_and_writing_keeps_every_bit_of_every_published_tensor(case: Case, limit: int, tmp_path: Path) -> None:
    policy = case.policy
    save_checkpoint(tmp_path, policy.state_dict(), policy.config, policy.tokenizer, policy.source, limit)
    torch.testing.assert_close(tensors(tmp_path), tensors(policy.source), rtol=0, atol=0)


@pytest.mark.parametrize("case", GOLDEN, indirect=True)
def test_the_same_weights_in_several_files_are_the_same_policy(case: Case) -> None:
    sharded = fixture_model(f"{case.said['name']}-sharded")
    torch.testing.assert_close(load_policy(str(sharded)).state_dict(), case.policy.state_dict(), rtol=0, atol=0)


def tensors(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found
