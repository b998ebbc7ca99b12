"""Steps, blocks and states of a rollout, worked out by hand."""

from __future__ import annotations

import pytest
import torch

from dare_lightning.diffusion.shares import MAX_PARTS, STEP_AGGREGATIONS, step_shares
from dare_lightning.diffusion.trajectory import (
    UNUSED,
    collapse_steps,
    dense_steps,
    draw_steps,
    left_to_right_steps,
    states_from_steps,
)

MASK = 9
IDS = torch.tensor([[1, 2, 3, 4, 5, 6]])
RESPONSE = torch.tensor([[False, False, True, True, True, True]])


def test_steps_are_numbered_without_gaps_in_the_whole_response_or_in_each_block() -> None:
    step = torch.tensor([[-1, -1, 7, 2, 2, 9], [-1, 4, 4, 0, -1, 0]])
    assert dense_steps(step).tolist() == [[-1, -1, 1, 0, 0, 2], [-1, 1, 1, 0, -1, 0]]
    block = torch.tensor([[0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 2, 2]])
    assert dense_steps(step, block).tolist() == [[-1, -1, 1, 0, 0, 1], [-1, 0, 1, 0, -1, 0]]


def test_a_rollout_that_wrote_nothing_has_no_steps() -> None:
    nothing = torch.full((2, 3), -1)
    assert torch.equal(dense_steps(nothing), nothing)
    rows = states_from_steps(nothing, nothing == -1, nothing, nothing == -1, MASK)
    assert rows.count == 1
    assert not rows.score_mask.any()


def test_left_to_right_steps_follow_the_columns() -> None:
    response = torch.tensor([[False, True, True, True, False]])
    assert left_to_right_steps(response).tolist() == [[-1, 0, 1, 2, -1]]
    assert left_to_right_steps(response, torch.tensor([[0, 0, 1, 1, 2]])).tolist() == [[-1, 0, 0, 1, -1]]


def test_collapsing_merges_consecutive_steps_and_hides_what_they_write_together() -> None:
    step = torch.tensor([[-1, -1, 2, 0, 1, 3]])
    merged = collapse_steps(step, 2)
    assert merged.tolist() == [[-1, -1, 1, 0, 0, 1]]
    rows = states_from_steps(IDS, RESPONSE, merged, RESPONSE, MASK)
    assert rows.noisy_ids.tolist() == [[[1, 2, MASK, MASK, MASK, MASK], [1, 2, MASK, 4, 5, MASK]]]
    assert rows.score_mask.long().tolist() == [[[0, 0, 0, 1, 1, 0], [0, 0, 1, 0, 0, 1]]]
    with pytest.raises(ValueError, match="shrink=0"):
        collapse_steps(step, 0)


def test_what_no_step_wrote_is_hidden_in_every_state() -> None:
    step = torch.tensor([[-1, -1, 0, 1, -1, -1]])
    rows = states_from_steps(IDS, RESPONSE, step, RESPONSE, MASK)
    assert rows.noisy_ids.tolist() == [[[1, 2, MASK, MASK, MASK, MASK], [1, 2, 3, MASK, MASK, MASK]]]


def test_rows_reach_as_far_as_a_counted_token_needs() -> None:
    step = torch.tensor([[-1, -1, 0, 1, 2, 3], [-1, -1, 0, 0, 0, 0]])
    counted = torch.tensor([[False, False, True, True, False, False]] * 2)
    rows = states_from_steps(IDS.expand(2, -1), RESPONSE.expand(2, -1), step, counted, MASK)
    assert rows.count == 2
    assert rows.score_mask.sum((1, 2)).tolist() == [2, 2]
    assert not rows.score_mask[1, 1].any()


def test_drawn_steps_belong_to_the_sample_and_stand_for_all() -> None:
    step = torch.tensor([[-1, -1, 0, 1, 2, 3], [-1, -1, 0, 0, 5, 5]])
    counted = step >= 0
    seeds = torch.tensor([11, 12])
    drawn = draw_steps(step, counted, seeds, (0,), 2)
    assert drawn.scale.tolist() == [2.0, 1.0]
    assert drawn.at[1].tolist() == [0, 5]
    assert drawn.chosen.sum(1).tolist() == [2, 4]
    alone = draw_steps(step[:1], counted[:1], seeds[:1], (0,), 2)
    assert torch.equal(alone.at, drawn.at[:1])
    draws = {tuple(draw_steps(step, counted, seeds, (n,), 2).at[0].tolist()) for n in range(40)}
    assert len(draws) == 6
    one = draw_steps(step, torch.tensor([[True] * 6, [False] * 6]), seeds, (0,), 3)
    assert one.at[1].tolist() == [UNUSED] * 3
    assert one.scale.tolist()[1] == 0


def test_a_drawn_step_is_scored_in_its_own_state() -> None:
    step = torch.tensor([[-1, -1, 0, 1, 2, 3]])
    rows = states_from_steps(IDS, RESPONSE, step, RESPONSE, MASK, torch.tensor([[1, 3, UNUSED]]))
    assert rows.noisy_ids[0].tolist() == [[1, 2, 3, MASK, MASK, MASK], [1, 2, 3, 4, 5, MASK], [1, 2, 3, 4, 5, 6]]
    assert rows.score_mask[0].long().tolist() == [[0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0]]


# Three tokens of step 0 and one of step 1 in the first sample, one of step 0 in the second; the last does not count.
STEP = torch.tensor([[0, 0, 0, 1], [0, 1, -1, -1]])
COUNTED = torch.tensor([[True, True, True, True], [True, False, False, False]])
ROOM = torch.tensor([[True] * 4, [True, True, False, False]])
LOSS = torch.tensor([[1.0, 2.0, 3.0, 8.0], [5.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
BY_HAND = {
    "token_mean": 19 / 5,
    "dr_grpo": 19 / 6,
    "taught_dr_grpo": 19 / 4,
    "step_mean": (11 / 4 + 8) / 2,
    "transition_mean": ((2 + 8) / 2 + 5) / 2,
    "row_mean": (2 + 8 + 5) / 3,
    "row_dr_grpo": 19 / (2 * 4 + 2),
    "group_mean": (14 / 4 + 5) / 2,
}


@pytest.mark.parametrize("mode", STEP_AGGREGATIONS)
def test_averages_by_hand_however_the_batch_is_split(mode: str) -> None:
    def shares(rows: slice) -> object:
        return step_shares(
            mode,  # type: ignore[arg-type]
            COUNTED[rows],
            STEP[rows],
            response_mask=ROOM[rows],
            group=torch.tensor([3, 8])[rows],
            taught=torch.tensor([True, False])[rows],
        )

    for split in ([slice(0, 2)], [slice(0, 1), slice(1, 2)]):
        parts = [shares(rows) for rows in split]
        denominator = sum(part.denominator for part in parts)  # type: ignore[attr-defined]
        totals = [part.total(LOSS[rows], denominator) for part, rows in zip(parts, split, strict=True)]  # type: ignore[attr-defined]
        loss = sum((total / denominator.clamp(min=1e-30)).sum() for total in totals)
        assert float(loss) == pytest.approx(BY_HAND[mode])


def test_too_many_parts_are_refused_with_another_average() -> None:
    step = torch.tensor([[0, MAX_PARTS]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="at most 4096 steps, found number 4096; use aggregation=transition_mean"):
        step_shares("step_mean", mask, step, response_mask=mask)
    with pytest.raises(ValueError, match="does not exist; choose one of token_mean"):
        step_shares("mean", mask, step, response_mask=mask)  # type: ignore[arg-type]
