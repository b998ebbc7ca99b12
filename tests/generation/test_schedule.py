from __future__ import annotations

import json

import pytest
import torch

from dare_lightning.generation.schedule import (
    AscendingSchedule,
    DreamSchedule,
    EvenSchedule,
    MaskRatioSchedule,
    OriginSchedule,
    Place,
    best_positions,
)
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


@pytest.mark.parametrize("path", golden_files("generation/units-masked.json"))
def test_curves_of_mask_ratios_are_the_published_ones(path):
    for case in json.loads(path.read_text())["mdpo_schedule"]["cases"]:
        assert tokens(MaskRatioSchedule(case["mode"]), case["masks"], case["steps"]) == case["tokens"], case


@pytest.mark.parametrize("path", golden_files("generation/units-masked.json"))
def test_ascending_blocks_and_steps_are_the_published_ones(path):
    for case in json.loads(path.read_text())["ass_schedule"]["cases"]:
        schedule = AscendingSchedule(case["block_num"])
        layout = schedule.layout(case["gen_length"], None, case["steps"])
        sizes = [end - start for start, end in zip(layout.bounds, layout.bounds[1:], strict=False)]
        steps = [list(range(*pair)) for pair in zip(layout.first_steps, layout.first_steps[1:], strict=False)]
        assert sizes == case["block_sizes"]
        assert steps == case["block_steps"]
        found = []
        for size, own in zip(sizes, steps, strict=True):
            step = torch.arange(len(own))
            place = Place(*(torch.full_like(step, n) for n in (size, 0, len(own), own[0])))
            left = [size, *schedule.masks_left(Place(place.block_masks, step, place.steps, place.first_step)).tolist()]
            found += [before - after for before, after in zip(left, left[1:], strict=False)]
        assert found == case["tokens_per_step"]


@pytest.mark.parametrize("path", golden_files("generation/units-masked.json"))
def test_dream_commits_as_many_as_published_and_skips_the_steps_that_commit_none(path):
    for case in json.loads(path.read_text())["dream_schedule"]["cases"]:
        schedule, steps, left, step, found = DreamSchedule(case["eps"]), case["steps"], case["masks"], 0, []
        while left > 0:
            masks, place = torch.tensor([left]), Place(*(torch.tensor([n]) for n in (case["masks"], step, steps, 0)))
            idle = int(schedule.idle(masks, place))
            step += idle
            place = Place(*(torch.tensor([n]) for n in (case["masks"], step, steps, 0)))
            count = int(schedule.select(torch.zeros(1, left), torch.ones(1, left, dtype=torch.bool), place).sum())
            found += [0] * idle + [count]
            left, step = left - count, step + 1
        assert found == case["tokens"]


def test_steps_of_a_curve_that_change_nothing_are_skipped():
    place = Place(*(torch.tensor([n, n]) for n in (16, 1, 16, 0)))
    assert MaskRatioSchedule("cosine").idle(torch.tensor([15, 16]), place).tolist() == [2, 0]


def test_origin_commits_with_the_probability_of_its_step():
    place = Place(*(torch.tensor([n]) for n in (4, 1, 4, 0)))
    probability = 1 - (1 - 2 * 0.25) / (1 - 0.25)  # eps 0
    score = torch.tensor([[probability - 0.01, probability + 0.01, 0.0, 0.99]])
    open_ = torch.tensor([[True, True, False, True]])
    assert OriginSchedule(0.0).select(score, open_, place).tolist() == [[True, False, False, False]]
    last = Place(*(torch.tensor([n]) for n in (4, 3, 4, 0)))
    assert torch.equal(OriginSchedule(0.0).select(score, open_, last), open_)


@pytest.mark.parametrize(
    ("schedule", "sizes", "message"),
    [
        (AscendingSchedule(), (16, None, 5), r"takes exactly 4 steps, floor\(log2\(16\)\); set steps to 4 or null"),
        (AscendingSchedule(), (16, 8, 4), "block_length=8: an ascending schedule cuts blocks that fit its steps"),
        (AscendingSchedule(5), (16, None, None), "blocks=5 must lie in 1 to 4"),
        (AscendingSchedule(), (1, None, None), "max_new_tokens=1 is too short"),
        (DreamSchedule(1.0), (16, None, None), r"eps=1.0 must lie in \[0, 1\)"),
        (DreamSchedule(), (16, 4, 6), "steps=6 is not a multiple of the 4 blocks"),
    ],
)
def test_plans_that_do_not_fit_are_refused(schedule, sizes, message):
    with pytest.raises(ValueError, match=message):
        schedule.layout(*sizes)


@pytest.mark.parametrize("curve", ["square", "pow", "pow-1", "pow0", "pown"])
def test_an_unknown_curve_is_refused(curve):
    with pytest.raises(ValueError, match="is not one of linear, cosine, log, exp, or pow with an exponent"):
        MaskRatioSchedule(curve)


@pytest.mark.parametrize("curve", ["linear", "cosine", "log", "exp", "pow3"])
@pytest.mark.parametrize("masks", [1, 2, 7])
def test_every_curve_ends_with_nothing_left(curve, masks):
    found = tokens(MaskRatioSchedule(curve), masks, 5)
    assert sum(found) == masks
    assert min(found) >= 0
