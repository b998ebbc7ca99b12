from __future__ import annotations

import json

import pytest
import torch

from dare_lightning.generation.schedule import EvenSchedule, Place, best_positions
from tests.shared import golden_files


def tokens(schedule, masks: int, steps: int) -> list[int]:
    """What each step of a block commits."""
    step = torch.arange(steps)
    place = Place(torch.full((steps,), masks), step, torch.full((steps,), steps), torch.zeros_like(step))
    left = [masks, *schedule.masks_left(place).tolist()]
    return [before - after for before, after in zip(left, left[1:], strict=False)]


@pytest.mark.parametrize("path", golden_files("generation/units-masked.json"))
def test_the_schedule_is_the_published_one(path):
    for case in json.loads(path.read_text())["llada_num_transfer_tokens"]["cases"]:
        assert tokens(EvenSchedule(), case["masks"], case["steps"]) == case["tokens"]


@pytest.mark.parametrize("path", golden_files("generation/units-masked.json"))
def test_the_most_confident_positions_are_the_published_ones(path):
    for case in json.loads(path.read_text())["selection"]["cases"]:
        score, masked = torch.tensor([case["confidence"]]), torch.tensor([case["masked"]]).bool()
        for count in (1, 2, 3):
            if f"topk_{count}" in case:
                chosen = best_positions(score, masked, torch.tensor([count]))
                assert chosen.int().tolist() == [case[f"topk_{count}"]]


def test_of_equal_scores_the_leftmost_is_taken():
    chosen = best_positions(torch.zeros(1, 4), torch.tensor([[False, True, True, True]]), torch.tensor([2]))
    assert chosen.tolist() == [[False, True, True, False]]


def test_an_even_schedule_commits_by_block_and_step_of_each_row():
    score = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.1, 0.4, 0.3, 0.2]])
    masked = torch.tensor([[True, True, True, True], [True, False, True, False]])
    place = Place(torch.tensor([4, 4]), torch.tensor([0, 1]), torch.tensor([3, 3]), torch.tensor([0, 0]))
    chosen = EvenSchedule().select(score, masked, place)
    assert chosen.tolist() == [[False, True, True, False], [False, False, True, False]]
