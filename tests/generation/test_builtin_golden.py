"""The published sampler's outputs, token for token and pass for pass."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from dare_lightning.families.checkpoint import read_config
from dare_lightning.families.load import families, load_policy
from dare_lightning.generation.builtin import BuiltinBackend
from tests.shared import fixture_model, golden_files

SETTINGS = {
    "steps": "steps",
    "gen_length": "max_new_tokens",
    "block_length": "block_length",
    "temperature": "temperature",
    "cfg_scale": "cfg_scale",
    "remasking": "remasking",
    "logits_eos_inf": "suppress_eos",
    "confidence_eos_eot_inf": "defer_eos",
}


@pytest.mark.parametrize("path", golden_files("generation/*-llada.json"))
def test_generation_equals_the_published_sampler(path):
    golden = json.loads(path.read_text())
    folder = fixture_model(golden["checkpoint"])
    if not any(family.matches(read_config(folder)) for family in families()):
        pytest.skip(f"no family reads {golden['checkpoint']} yet")
    policy = load_policy(str(folder))
    for case in golden["cases"]:
        assert case["eos_id"] == policy.eos_token_id
        assert case["mask_id"] == policy.mask_token_id
        assert case["eot_id"] in policy.stop_token_ids
        check_case(policy, case)


def check_case(policy: Any, case: dict[str, Any]) -> None:
    settings = {SETTINGS[name]: value for name, value in case["args"].items()}
    backend = BuiltinBackend(**settings, early_stop=False, eos_policy="keep")
    backend.update_weights(policy, version=0)
    prompts = [
        [token for token, exists in zip(ids, mask, strict=True) if exists]
        for ids, mask in zip(case["prompt_ids"], case["attention_mask"], strict=True)
    ]
    batch = backend.generate(prompts, list(range(len(prompts))))
    start = len(case["prompt_ids"][0])
    tokens, steps = batch.ids[:, start:], batch.commit_step[:, start:]
    name = case["name"]
    assert tokens.tolist() == [row[start:] for row in case["output_ids"]], name
    assert [prompt_of(batch, i) for i in range(len(prompts))] == prompts, name
    assert dense_rank(steps) == case["commit_rank"], name
    assert backend.stats.forwards == case["nfe"], name
    states = [torch.where(steps >= t, case["mask_id"], tokens).tolist() for t in range(case["nfe"] + 1)]
    assert states == case["states_generated_part"], name


def prompt_of(batch: Any, row: int) -> list[int]:
    return batch.ids[row][batch.prompt_mask[row]].tolist()


def dense_rank(steps: Tensor) -> list[list[int]]:
    return [row.unique(return_inverse=True)[1].tolist() for row in steps]
