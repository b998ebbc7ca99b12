"""Every recorded decoding of SDAR, LLaDA2.0 and LLaDA2.1: states, tokens, steps and log-probs."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from dare_lightning.diffusion.blocks import block_index
from dare_lightning.diffusion.shares import step_shares
from dare_lightning.diffusion.trajectory import dense_steps, states_from_steps
from dare_lightning.families.load import load_policy
from dare_lightning.generation.block import BlockBackend
from dare_lightning.generation.block_engine import EarlyStop, Editing
from dare_lightning.generation.block_steps import (
    AboveThreshold,
    BlockSteps,
    ConstantQuota,
    EntropyBounded,
    MostConfident,
    Sequential,
    quota,
)
from dare_lightning.replay.batch import SequenceBatch
from tests.shared import GOLDEN, fixture_model, golden_files

DRAWN = "drawn from a global generator: the same distribution here, other numbers"


def sampling(params: dict[str, Any]) -> dict[str, Any]:
    """How tokens are drawn."""
    return {"temperature": params.get("temperature", 0.0)} | {key: params.get(key) for key in ("top_p", "top_k")}


def is_drawn(params: dict[str, Any]) -> bool:
    """Whether more than one token could have been written anywhere."""
    found = sampling(params)
    return found["temperature"] > 0 and found["top_k"] != 1


def settings() -> list[Any]:
    """Every recorded setting but those that document a defect, as pytest parameters."""
    found = []
    for pattern in ("sdar*", "llada2*"):
        for path in sorted(GOLDEN.glob(f"generation/{pattern}.json")):
            for setting in json.loads(path.read_text())["settings"]:
                if "upstream_quirk" not in setting:
                    marks = [pytest.mark.skip(reason=DRAWN)] if is_drawn(setting["params"]) else []
                    found.append(pytest.param(path, setting["name"], marks=marks, id=f"{path.stem}-{setting['name']}"))
    return found or [pytest.param(None, None, marks=pytest.mark.skip(reason="no golden/generation (DARE_GOLDEN_DIR)"))]


@cache
def read(path: Path) -> tuple[dict[str, Any], Any]:
    said = json.loads(path.read_text())
    folder = fixture_model(said["model"])
    return said, load_policy(str(folder))


def sdar_backend(params: dict[str, Any]) -> BlockBackend:
    steps: BlockSteps
    if "eb_threshold" in params:
        steps = EntropyBounded(params["eb_threshold"])
    elif params["remasking_strategy"] == "sequential":
        steps = Sequential(params["denoising_steps"])
    elif params["remasking_strategy"] == "low_confidence_static":
        steps = MostConfident(params["denoising_steps"])
    else:
        steps = AboveThreshold(params["confidence_threshold"], params["denoising_steps"])
    return BlockBackend(params["gen_length"], steps=steps, **sampling(params))


def llada2_backend(params: dict[str, Any], family: str) -> BlockBackend:
    length, threshold, drawn = params["gen_length"], params.get("threshold", 0.95), sampling(params)
    early = params.get("eos_early_stop", False)
    if family == "llada21":
        editing = Editing(params.get("editing_threshold", 0.9), params.get("max_post_steps", 16))
        chosen = ConstantQuota(threshold, least=params.get("num_to_transfer", 1))
        return BlockBackend(length, steps=chosen, editing=editing, early_stop="block" if early else "never", **drawn)
    planned = min(params.get("steps", 32), length // params.get("minimal_topk", 1))
    early_stop: EarlyStop = "token" if early else "block"
    return BlockBackend(length, steps=AboveThreshold(threshold, planned), early_stop=early_stop, **drawn)


def decode(path: Path, name: str) -> tuple[dict[str, Any], Any, SequenceBatch]:
    """A setting, the policy it is about, and what the backend makes of it."""
    said, policy = read(path)
    setting = next(s for s in said["settings"] if s["name"] == name)
    params, sdar = setting["params"], said["family"].startswith("sdar")
    backend = sdar_backend(params) if sdar else llada2_backend(params, said["family"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "block_length", params["block_length"])
        stop = params.get("stopping_criteria_idx", policy.stop_token_ids) if sdar else [params["eos_id"]]
        patch.setattr(policy, "stop_token_ids", tuple(stop))
        backend.update_weights(policy, 0)
        return setting, policy, backend.generate([setting["prompt_ids"]], [0], record_states=True)


@pytest.mark.parametrize(("path", "name"), settings())
def test_tokens_states_steps_and_log_probs_are_the_recorded_ones(path: Path, name: str) -> None:
    setting, policy, batch = decode(path, name)
    exists = batch.attention_mask[0]
    # A token that no step wrote was still a mask when decoding stopped.
    unwritten = batch.response_mask[0] & (batch.commit_step[0] < 0)
    found = batch.ids[0].masked_fill(unwritten, policy.mask_token_id)[exists].tolist()
    expected = setting.get("sequence", setting.get("canvas"))
    assert found == expected[: len(found)]
    assert set(expected[len(found) :]) <= {policy.mask_token_id}
    size = setting["params"]["block_length"]
    assert len(found) == setting["blocks"][-1]["start"] + size

    states = [(block["start"], state) for block in setting["blocks"] for state in block["states"][:-1]]
    assert int(batch.forward_passes[0]) == len(states)
    for read_, (start, state) in zip(batch.states[0, :, exists], states, strict=True):
        assert read_[start : start + size].tolist() == state

    block = batch.block_ids(size)
    local = (dense_steps(batch.commit_step, block)[0] + 1)[exists].tolist()
    key = "step_map" if "step_map" in setting else "last_step_map"
    if key == "step_map" or setting["first_step_map"] == setting["last_step_map"]:
        assert local == setting[key][: len(local)]

    last: dict[int, float] = {}
    for recorded in setting["blocks"]:
        for step in recorded["steps"]:
            last |= {recorded["start"] + i: value for i, value in zip(step["changed"], step["logprobs"], strict=True)}
    written = batch.commit_log_probs[0, exists]
    assert {i: float(written[i]) for i in last} == pytest.approx(last, abs=1e-4)

    # Where nothing is said to be returned, whole blocks were; where the prompt was, it is a recorded inconsistency.
    if "returned" in setting:
        skipped = len(setting["prompt_ids"]) if setting.get("returned_includes_prompt") else 0
        answer = batch.ids[0, batch.completion_mask[0]].tolist()
        assert answer == setting["returned"][skipped:][: len(answer)]
        assert skipped or len(answer) == len(setting["returned"])


@pytest.mark.parametrize("path", golden_files("generation/units-block.json"))
def test_blocks_and_due_tokens_are_the_recorded_ones(path: Path) -> None:
    units = json.loads(path.read_text())
    for key, expected in units["transfer_schedule"]["table"].items():
        length, steps = map(int, key.split(","))
        due = quota(length, steps, torch.arange(steps)).tolist()
        # Steps that are due nothing are never reached: all masks are gone.
        assert [max(1, number) for number in expected] == due
    compact = units["token_block_ids"]
    columns = torch.arange(max(compact["valid_lengths"]))
    exists = columns < torch.tensor(compact["valid_lengths"])[:, None]
    response = exists & (columns >= torch.tensor(compact["prompt_lengths"])[:, None])
    padded = units["padded_block_ids"]
    there = torch.tensor(padded["attention_mask"]).bool()
    answer = there & (torch.arange(there.shape[1]) >= padded["prompt_section_length"])
    for origin in ("global", "response"):
        found = block_index(exists, response, compact["block_length"], origin)
        assert found.tolist() == compact[origin]
        assert block_index(there, answer, padded["block_length"], origin).tolist() == padded[origin]


@pytest.mark.parametrize("path", golden_files("generation/units-block.json"))
def test_replayed_steps_and_their_weights_are_the_recorded_ones(path: Path) -> None:
    units = json.loads(path.read_text())
    weights = units["cj_block_step_weights"]
    exists = torch.tensor(weights["attention_mask"]).bool()
    prompt = weights["prompt_section_length"]
    response = exists & (torch.arange(exists.shape[1]) >= prompt)
    step = torch.full(exists.shape, -1)
    step[:, prompt:] = torch.tensor(weights["local_step_map_0based"])
    block = block_index(exists, response, weights["block_length"], "global")
    assert torch.equal(dense_steps(step, block), step)

    shares = step_shares("transition_mean", response & (step >= 0), step, response_mask=response, block=block)
    found = shares.weight[:, prompt:]
    expected = torch.tensor(weights["weights_B_K_R"]).sum(1).to(found.dtype)
    torch.testing.assert_close(found / found.sum(1, keepdim=True), expected)

    # Recorded inputs mask the padding behind a response too; nothing reads it.
    ids = torch.arange(100, 100 + exists.shape[1]).expand_as(step)
    rows = states_from_steps(ids, response, step, response, -7)
    for number, recorded in enumerate(units["cj_step_inputs"]["steps"]):
        noisy, target = torch.tensor(recorded["noisy_ids"]), torch.tensor(recorded["target_mask"]).bool()
        assert recorded["local_step"] == number
        assert torch.equal(rows.noisy_ids[:, number][exists], noisy[exists])
        assert torch.equal(rows.score_mask[:, number], target)
