from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from dare_lightning.generation.show import as_json, render_denoising, step_style
from dare_lightning.replay.batch import SequenceBatch
from tests.shared import fixture_model
from tests.tiny import EOS, PAD, tiny_tokenizer


@pytest.fixture
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def batch(tokenizer) -> SequenceBatch:
    """Two prompts, "12" and "3"; the answers "45" and an end token, then a tail that does not count."""
    ids = torch.tensor([[*tokenizer.encode("12"), *tokenizer.encode("45"), EOS, EOS]] * 2)
    ids[1, 0] = PAD
    attention = torch.ones(2, 6, dtype=torch.bool)
    attention[1, 0] = False
    response = torch.tensor([[False, False, True, True, True, True]] * 2)
    completion = torch.tensor([[False, False, True, True, True, False]] * 2)
    return SequenceBatch(
        ids=ids,
        attention_mask=attention,
        response_mask=response,
        completion_mask=completion,
        noise_seed=torch.tensor([7, 8]),
        sample_index=torch.arange(2),
        commit_step=torch.tensor([[-1, -1, 1, 0, 2, -1]] * 2),
        commit_log_probs=torch.tensor([[0.0, 0.0, -0.5, -0.25, -1.0, 0.0]] * 2),
        forward_passes=torch.tensor([3, 3]),
    )


def colours(text) -> dict[str, object]:
    return {text.plain[span.start : span.end]: span.style for span in text.spans}


def test_tokens_take_the_colour_of_the_pass_that_wrote_them(tokenizer, batch):
    text = render_denoising(tokenizer, batch, 0)
    found = colours(text)
    assert text.plain.startswith("45<|endoftext|>\n")
    assert found["5"] == step_style(0, 2)
    assert found["4"] == step_style(1, 2)
    assert found["<|endoftext|>"] == step_style(2, 2)
    assert len({found["5"], found["4"], found["<|endoftext|>"]}) == 3


def test_the_legend_names_the_passes(tokenizer, batch):
    assert render_denoising(tokenizer, batch, 0).plain.splitlines()[-1].split() == ["forward", "pass", "0", "1", "2"]


def test_tokens_that_no_pass_wrote_are_dim(tokenizer, batch):
    kept = replace(batch, completion_mask=batch.response_mask)
    text = render_denoising(tokenizer, kept, 0)
    assert text.spans[3].style == step_style(-1, 2)
    assert text.plain.endswith("filled without one")


def test_a_character_made_of_several_tokens_is_shown_whole():
    from dare_lightning.families.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(fixture_model("llada-tiny-a"))
    ids = torch.tensor([tokenizer.encode("a\N{SNOWMAN}b", add_special_tokens=False)])
    everything = torch.ones_like(ids, dtype=torch.bool)
    batch = SequenceBatch(
        ids=ids,
        attention_mask=everything,
        response_mask=everything,
        completion_mask=everything,
        noise_seed=torch.tensor([0]),
        sample_index=torch.tensor([0]),
        commit_step=torch.arange(ids.shape[1])[None],
    )
    assert ids.shape[1] > 3
    text = render_denoising(tokenizer, batch, 0)
    assert text.plain.splitlines()[0] == "a\N{SNOWMAN}b"
    assert colours(text)["\N{SNOWMAN}"] == step_style(ids.shape[1] - 2, ids.shape[1] - 1)


def test_a_json_record_survives_a_round_trip(tokenizer, batch):
    record = json.loads(json.dumps(as_json(tokenizer, batch, 0, {"steps": 3})))
    assert record == {
        "prompt": "12",
        "completion": "45",
        "prompt_ids": batch.ids[0, :2].tolist(),
        "completion_ids": batch.ids[0, 2:5].tolist(),
        "commit_steps": [1, 0, 2],
        "log_probs": [-0.5, -0.25, -1.0],
        "forward_passes": 3,
        "seed": 7,
        "settings": {"steps": 3},
    }
    assert as_json(tokenizer, batch, 1)["prompt"] == "2"


def test_a_batch_without_commit_steps_cannot_be_shown(tokenizer, batch):
    with pytest.raises(ValueError, match="no commit_step"):
        render_denoising(tokenizer, replace(batch, commit_step=None), 0)
