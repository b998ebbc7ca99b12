"""The published samplers' outputs, token for token and pass for pass.

What is left out, and why, is said by `left_out`.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from dare_lightning.diffusion.trajectory import collapse_steps, dense_steps
from dare_lightning.families.checkpoint import read_config
from dare_lightning.families.load import families, load_policy
from dare_lightning.generation.builtin import BuiltinBackend
from tests.generation.published import settings_of
from tests.shared import fixture_model, golden_files

PARTS = ("llada", "dream", "fastdllm", "eoser-ass", "mdpo", "dare-cj")


def left_out(case: dict[str, Any]) -> str:
    """Why a case is not compared; empty where it is."""
    if case.get("leftover_masks") and cached(case):
        return "published cached code leaves masks where a block has one step"
    if "seed" in case["args"]:
        return "hangs on the order of calls of a global generator"
    return ""


def cached(case: dict[str, Any]) -> bool:
    """Whether it was decoded with a cache of keys and values."""
    return bool({"suffix", "block"} & set(case["forward_kinds"]))


def cases(*parts: str) -> list[Any]:
    """Every case of every file of these parts."""
    found = []
    for file in [file for part in parts for file in golden_files(f"generation/*-{part}.json")]:
        if file.values[0] is None:
            found.append(pytest.param(None, None, marks=file.marks, id=file.id))
            continue
        golden = json.loads(file.values[0].read_text())
        for case in golden["cases"]:
            reason = left_out(case)
            marks = [pytest.mark.skip(reason=reason)] if reason else []
            found.append(pytest.param(golden, case, marks=marks, id=f"{golden['checkpoint']}-{case['name']}"))
    return found


@pytest.fixture(scope="module")
def policies():
    """Loads each checkpoint once."""
    loaded: dict[str, Any] = {}

    def load(checkpoint: str) -> Any:
        folder = fixture_model(checkpoint)
        if not any(family.matches(read_config(folder)) for family in families()):
            pytest.skip(f"no family reads {checkpoint} yet")
        if checkpoint not in loaded:
            loaded[checkpoint] = load_policy(str(folder))
        return loaded[checkpoint]

    return load


@pytest.mark.parametrize(("golden", "case"), cases(*PARTS))
def test_generation_equals_the_published_sampler(policies, golden, case):
    policy = policies(golden["checkpoint"])
    assert case["mask_id"] == policy.mask_token_id
    backend = BuiltinBackend(**settings_of(golden["part"], case))
    backend.update_weights(policy, version=0)
    prompts = [
        [token for token, exists in zip(ids, mask, strict=True) if exists]
        for ids, mask in zip(case["prompt_ids"], case["attention_mask"], strict=True)
    ]
    batch = backend.generate(prompts, list(range(len(prompts))), record_states=not cached(case))
    start = len(case["prompt_ids"][0])
    tokens, steps = batch.ids[:, start:], batch.commit_step[:, start:]
    assert tokens.tolist() == [row[start:] for row in case["output_ids"]]
    assert [batch.ids[row][batch.prompt_mask[row]].tolist() for row in range(len(prompts))] == prompts
    # What no pass wrote, published code fills in after its last pass.
    steps = torch.where(steps < 0, backend.stats.forwards - 1, steps)
    assert dense_rank(steps) == case["commit_rank"]
    if cached(case):
        # States are not recorded, but follow from the commits; published code wastes a pass on some blocks.
        assert backend.stats.forwards <= case["nfe"]
        return
    assert states_of(batch.states[:, :, start:], tokens) == without_repeats(case["states_generated_part"])
    # Published code also makes passes that commit nothing.
    assert backend.stats.forwards == len(without_repeats(case["states_generated_part"])) - 1
    check_extras(batch, batch.commit_step[:, start:], start, golden["part"], case)


@pytest.mark.parametrize(("golden", "case"), cases("varlen"))
def test_lengths_change_as_published(policies, monkeypatch, golden, case):
    policy = policies(golden["checkpoint"])
    settings = settings_of(golden["part"], case)
    backend = BuiltinBackend(**settings)
    backend.update_weights(policy, version=0)
    padding = [list(mask).count(0) for mask in case["attention_mask"]]  # on the left
    prompts = [ids[count:] for ids, count in zip(case["prompt_ids"], padding, strict=True)]
    read = []
    original = policy.hidden_states
    monkeypatch.setattr(policy, "hidden_states", lambda ids, mask: (read.append(ids.tolist()), original(ids, mask))[1])
    batch = backend.generate(prompts, list(range(len(prompts))))
    found = [batch.ids[row][batch.attention_mask[row]].tolist() for row in range(len(prompts))]
    assert found == [ids[count:] for ids, count in zip(case["output_ids"], padding, strict=True)]
    if len(prompts) == 1 and padding == [0]:
        # Published code reads a canvas of the greatest length once more before it begins to write.
        assert read == without_repeats(case["states"])


def check_extras(batch: Any, steps: Tensor, start: int, part: str, case: dict[str, Any]) -> None:
    """Proposals and their confidence, or which positions each slice of a trajectory holds."""
    if part == "dare-cj":
        size = case["args"]["block_length"] * case["args"]["steps"] // case["args"]["gen_length"]
        merged = collapse_steps(dense_steps(steps), size) if case["args"].get("step_merge") else steps
        expected = torch.tensor(case["extra"]["reversed_traj_unmask_positions_generated_part"]).bool()
        found = torch.stack([merged == step for step in range(expected.shape[1])], 1)
        assert torch.equal(found, expected)
    if part == "mdpo":
        proposals, confidence = batch.proposals[:, :, start:], batch.confidence[:, :, start:]
        results = torch.tensor([rows[0] for rows in case["extra"]["intermediate_results"]])
        ours = results != case["mask_id"]  # which is never proposed here
        assert torch.equal(proposals[0][ours], results[ours])
        if case["args"]["conf_alg"] == "llada":
            expected = torch.tensor(
                [[float(v or 0) for v in rows[0]] for rows in case["extra"]["intermediate_confidence"]]
            )
            compared = (expected != 0) & (confidence[0] != 0) & ours
            torch.testing.assert_close(confidence[0][compared], expected[compared], rtol=0, atol=1e-4)


def dense_rank(steps: Tensor) -> list[list[int]]:
    return [row.unique(return_inverse=True)[1].tolist() for row in steps]


def states_of(states: Tensor, final: Tensor) -> list[Any]:
    """[passes + 1][B][G]: what every pass read, then the result."""
    return [*states.transpose(0, 1).tolist(), final.tolist()]


def without_repeats(states: list[Any]) -> list[Any]:
    """The states without those that equal the one before: passes that committed nothing."""
    return [state for place, state in enumerate(states) if place == 0 or state != states[place - 1]]
