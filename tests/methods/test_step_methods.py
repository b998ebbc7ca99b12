"""What MDPO and d-TreeRPO make of a rollout: which steps, segments and tokens are trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dare_lightning.methods.d_tree_rpo import DTreeRPO
from dare_lightning.methods.mdpo import MDPO
from dare_lightning.replay.batch import SequenceBatch
from tests.methods.harness import build
from tests.methods.table_model import TablePolicy, random_tables, sequence_batch

MASK, END = 10, 9


def _passes() -> SequenceBatch:
    """Two answers of three tokens; the second was finished after two of the three passes."""
    ids = torch.tensor([[1, 2, 3, 4], [1, 5, END, END]])
    states = torch.tensor(
        [
            [[1, MASK, MASK, MASK], [1, 2, MASK, MASK], [1, 2, 3, MASK]],
            [[1, MASK, MASK, MASK], [1, 5, MASK, MASK], [0, 0, 0, 0]],
        ]
    )
    proposals = torch.tensor(
        [[[1, 7, 3, 4], [1, 2, 3, END], [1, 2, 3, 4]], [[1, 5, END, 6], [1, 5, END, 8], [0, 0, 0, 0]]]
    )
    return sequence_batch(
        ids,
        1,
        states=states,
        proposals=proposals,
        confidence=torch.full((2, 3, 4), 0.5),
        forward_passes=torch.tensor([3, 2]),
        step_rewards=torch.tensor([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]),
        group_index=torch.tensor([4, 4]),
        reward=torch.tensor([1.0, 1.0]),
    )


def _mdpo(**settings: Any) -> MDPO:
    module: MDPO = build(MDPO, TablePolicy(random_tables()), **settings)
    return module


def test_the_same_telling_steps_are_kept_for_all_answers() -> None:
    rewarded = replace(_passes(), step_rewards=torch.tensor([[0.5, 0.0, 1.0], [0.0, 1.0, 0.0]]))
    batch = _mdpo(train_steps=2, advantage="no_std").credit(rewarded)
    # Scores 1.5 + 0.5, 0.5 + 1, 2 + 1 and 1 + 1, 2 + 1, 1 + 1, where the second answer keeps its last reward.
    assert batch.step_advantage is not None
    torch.testing.assert_close(batch.step_advantage, torch.tensor([[-0.75, 0.5], [0.75, -0.5]]))
    assert batch.states is not None
    assert batch.states[0].tolist() == [[1, 2, MASK, MASK], [1, 2, 3, MASK]]
    assert batch.proposals is not None
    assert batch.proposals.shape == (2, 2, 4)
    assert batch.step_rewards is None


def test_a_step_is_as_telling_as_the_answers_that_made_it() -> None:
    batch = _mdpo(train_steps=2, advantage="no_std").credit(_passes())
    # Advantages of 0.25, 0.5 and 0.5, of both answers in the first two steps and of one in the last.
    assert batch.states is not None
    assert batch.states[0].tolist() == [[1, MASK, MASK, MASK], [1, 2, MASK, MASK]]


def test_a_finished_answer_has_nothing_to_score_in_later_steps() -> None:
    module = _mdpo(train_steps=3, advantage="no_std")
    batch = module.credit(_passes())
    assert batch.states is not None
    assert batch.states[1, 2].tolist() == [1, 5, END, END]
    rows = module.corrupt(batch)
    assert rows.score_mask.sum(-1).tolist() == [[3, 2, 1], [3, 2, 0]]
    assert module.count(batch).tolist() == [6.0, 4.0, 1.0]


def test_fewer_passes_than_trained_steps_leave_parts_empty() -> None:
    module = _mdpo(train_steps=5)
    assert module.count(module.credit(_passes())).tolist() == [6.0, 4.0, 1.0, 0.0, 0.0]


def test_proposals_count_up_to_the_first_proposed_end_where_asked() -> None:
    module = _mdpo(train_steps=3, count_after_eos=False, advantage="no_std")
    rows = module.corrupt(module.credit(_passes()))
    assert rows.score_mask[1].long().tolist() == [[0, 1, 1, 0], [0, 0, 1, 0], [0, 0, 0, 0]]


def test_a_step_without_advantage_is_not_run_unless_a_reference_holds_it() -> None:
    equal = replace(_passes(), step_rewards=torch.zeros(2, 3))
    module = _mdpo(train_steps=3)
    batch = module.credit(equal)
    assert not module.corrupt(batch).score_mask.any()
    assert module.count(batch)[0] == 6
    held = _mdpo(train_steps=3, kl_coef=0.1)
    assert held.corrupt(held.credit(equal)).score_mask.any()


def _tree(steps: int = 4) -> tuple[DTreeRPO, SequenceBatch]:
    """Two nodes of two leaves; four tokens, one a step; the last leaf ends in its third token."""
    ids = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 6, 7], [1, 8, 2, 4, 4], [1, 8, 2, END, 3]])
    batch = sequence_batch(
        ids,
        1,
        commit_step=torch.tensor([[-1, 0, 1, 2, 3]]).repeat(4, 1),
        node_index=torch.tensor([[0, 0], [0, 1], [1, 2], [1, 3]]),
        group_index=torch.zeros(4, dtype=torch.int64),
        reward=torch.tensor([1.0, 0.5, 0.0, 0.0]),
    )
    module: DTreeRPO = build(DTreeRPO, TablePolicy(random_tables()), denoising_steps=steps)
    return module, batch


def test_each_segment_is_scored_once_in_its_parents_state() -> None:
    module, batch = _tree()
    batch = module.credit(batch)
    rows = module.corrupt(batch)
    assert rows.noisy_ids[0].tolist() == [[1, MASK, MASK, MASK, MASK], [1, 2, 3, MASK, MASK]]
    first, second = rows.score_mask[:, 0].long(), rows.score_mask[:, 1].long()
    assert first.tolist() == [[0, 1, 1, 0, 0], [0] * 5, [0, 1, 1, 0, 0], [0] * 5]
    # The leaves of the second node are worth the same and teach nothing.
    assert second.tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 1, 1], [0] * 5, [0] * 5]
    assert module.count(batch).tolist() == [6.0]


def test_a_segment_counts_up_to_the_end_that_stands_in_its_child() -> None:
    module, batch = _tree()
    batch = replace(batch, reward=torch.tensor([1.0, 0.5, 0.0, 0.25]))
    rows = module.corrupt(module.credit(batch))
    assert rows.score_mask[3, 1].long().tolist() == [0, 0, 0, 1, 0]


def test_steps_that_are_not_the_rollouts_are_refused() -> None:
    module, batch = _tree(steps=3)
    with pytest.raises(ValueError, match="a token was written in step 3, method.denoising_steps=3"):
        module.credit(batch)
    module, batch = _tree(steps=8)
    with pytest.raises(ValueError, match="leaves of one node differ before it branches"):
        module.credit(batch)
