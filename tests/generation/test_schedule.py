from __future__ import annotations

import json

import pytest
import torch

from dare_lightning.generation.schedule import EvenSchedule, best_positions, num_transfer_tokens
from tests.shared import golden_files


@pytest.mark.parametrize("path", golden_files("generation/units-masked.json"))
def test_the_schedule_is_the_published_one(path):
    cases = json.loads(path.read_text())["llada_num_transfer_tokens"]["cases"]
    for case in cases:
        assert num_transfer_tokens(torch.tensor([case["masks"]]), case["steps"]).tolist() == [case["tokens"]]


@pytest.mark.parametrize("path", golden_files("generation/units-masked.json"))
def test_the_most_confident_positions_are_the_published_ones(path):
    for case in json.loads(path.read_text())["selection"]["cases"]:
        score, masked = torch.tensor([case["confidence"]]), torch.tensor([case["masked"]]).bool()
        for count in (1, 2, 3):
            if f"topk_{count}" in case:
                chosen = best_positions(score, masked, torch.tensor([count]))
                assert chosen.int().tolist() == [case[f"topk_{count}"]]


def test_rows_have_their_own_schedules():
    assert num_transfer_tokens(torch.tensor([7, 5]), 3).tolist() == [[3, 2, 2], [2, 2, 1]]


def test_of_equal_scores_the_leftmost_is_taken():
    chosen = best_positions(torch.zeros(1, 4), torch.tensor([[False, True, True, True]]), torch.tensor([2]))
    assert chosen.tolist() == [[False, True, True, False]]


def test_an_even_schedule_commits_by_block_and_step_of_each_row():
    score = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.1, 0.4, 0.3, 0.2]])
    masked = torch.tensor([[True, True, True, True], [True, False, True, True]])
    chosen = EvenSchedule(3).select(score, masked, torch.tensor([4, 4]), torch.tensor([0, 1]))
    assert chosen.tolist() == [[False, True, True, False], [False, False, True, False]]
