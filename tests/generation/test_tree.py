from __future__ import annotations

import pytest
import torch

from dare_lightning.callbacks.rollout import RolloutCallback
from dare_lightning.generation.builtin import BuiltinBackend
from dare_lightning.generation.schedule import AscendingSchedule, DreamSchedule, OriginSchedule
from dare_lightning.generation.threshold import ConfidenceThreshold, QuotaThreshold
from tests.equalities.conftest import Online
from tests.tiny import MASK

TREE = {"steps": 8, "block_length": 8, "temperature": 3.0, "tree": [2, 3]}
PROMPTS = [[5, 6, 7]] * 6 + [[9, 8, 10, 11]] * 6
SEEDS = list(range(20, 32))


@pytest.fixture
def grown(backend):
    return backend(**TREE).generate(PROMPTS, SEEDS, record_states=True)


def test_leaves_of_one_node_are_equal_until_it_branches(grown):
    for row in range(12):
        leader = row - row % 3
        for step in range(5):
            assert torch.equal(grown.states[row, step], grown.states[leader, step])
    before = torch.where(grown.commit_step < 4, grown.ids, MASK)
    for node in range(4):
        assert len(before[3 * node : 3 * node + 3].unique(dim=0)) == 1


def test_leaves_differ_once_their_node_has_branched(grown):
    early = torch.where(grown.commit_step < 4, grown.ids, MASK)
    assert len(early[:6].unique(dim=0)) == 2
    assert len(grown.ids[:6].unique(dim=0)) == 6
    assert len(grown.ids[6:].unique(dim=0)) == 6


def test_every_node_has_its_number(grown):
    assert grown.node_index[:, 0].tolist() == [row // 3 for row in range(12)]
    assert grown.node_index[:, 1].tolist() == list(range(12))


def test_a_node_is_read_once(backend):
    built = backend(**TREE)
    built.generate(PROMPTS, SEEDS)
    # Of each prompt: one canvas, 2 nodes for 3 more passes, the 2 nodes once more, 6 leaves for the last 3.
    assert built.stats.row_forwards == 2 * (1 + 3 * 2 + 2 + 3 * 6)
    assert built.stats.forwards == 8


def test_the_tree_of_a_prompt_does_not_depend_on_other_trees(backend, grown):
    alone = backend(**TREE, max_batch_tokens=1).generate(PROMPTS[6:], SEEDS[6:])
    assert torch.equal(alone.ids, grown.ids[6:])
    assert torch.equal(alone.commit_step, grown.commit_step[6:])


def test_commit_log_probs_and_passes_reach_every_leaf(backend, grown):
    assert grown.forward_passes.tolist() == [8] * 12
    before = (grown.commit_step >= 0) & (grown.commit_step < 4)
    for row in range(12):
        shared = before[row]
        assert torch.equal(grown.commit_log_probs[row][shared], grown.commit_log_probs[row - row % 3][shared])


def test_a_node_that_ends_before_it_branches_is_all_its_leaves(backend, policy):
    with torch.no_grad():
        head = policy.get_parameter("model.transformer.ff_out.weight")
        hidden = policy.hidden_states(torch.tensor([[5, 6, 7] + [4] * 16])).mean((0, 1))
        head[2] += 4.0 * hidden / hidden.norm() ** 2
    settings = TREE | {"steps": 12, "max_new_tokens": 12, "block_length": 1, "early_stop": True, "tree": [2, 2, 2]}
    batch = backend(**settings).generate([[5, 6, 7]] * 16, list(range(16)), record_states=True)
    short = batch.forward_passes < 5
    assert bool(short.any())
    for row in short.nonzero().flatten().tolist():
        assert torch.equal(batch.ids[row], batch.ids[row - row % 4])
        assert torch.equal(batch.states[row], batch.states[row - row % 4])
    assert bool(batch.attention_mask.any(1).all())
    assert not bool((batch.ids == MASK).any())


def test_plans_that_write_at_every_step_grow_trees(backend):
    for schedule, steps in ((DreamSchedule(), 6), (AscendingSchedule(2), 4)):
        settings = {"schedule": schedule, "steps": steps, "block_length": None}
        batch = backend(**TREE | settings).generate(PROMPTS[:6], SEEDS[:6])
        early = torch.where(batch.commit_step < steps // 2, batch.ids, MASK)
        assert len(early.unique(dim=0)) == 2
        assert len(batch.ids.unique(dim=0)) == 6


def test_greedy_leaves_are_one_completion(backend):
    batch = backend(**TREE | {"temperature": 0.0}).generate(PROMPTS[:6], SEEDS[:6])
    assert len(batch.ids.unique(dim=0)) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tree": []}, r"tree=\[\] must name the children at each level"),
        ({"tree": [2, 0]}, r"tree=\[2, 0\] must name the children"),
        ({"tree": [2, 2, 2]}, r"steps=8 is not a multiple of the 3 levels of tree=\[2, 2, 2\]; 9 would be"),
        ({"schedule": ConfidenceThreshold(), "steps": None}, "ConfidenceThreshold does not keep to a plan"),
        ({"schedule": QuotaThreshold()}, "QuotaThreshold does not keep to a plan"),
        ({"schedule": OriginSchedule(), "remasking": "random"}, "OriginSchedule does not keep to a plan"),
        ({"steps": 32}, "EvenSchedule has steps here that commit nothing.*at most as many steps as tokens"),
        ({"schedule": DreamSchedule(), "steps": 16}, "DreamSchedule has steps here that commit nothing"),
    ],
)
def test_bad_trees_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        BuiltinBackend(max_new_tokens=16, **TREE | settings)


@pytest.mark.parametrize("prompts", [PROMPTS[:5], [[5, 6, 7]] * 5 + [[8]]], ids=["too_few", "another_prompt"])
def test_prompts_that_are_no_groups_are_refused(backend, prompts):
    with pytest.raises(ValueError, match=r"tree=\[2, 3\] has 6 leaves.*set data.group_size=6"):
        backend(**TREE).generate(prompts, SEEDS[: len(prompts)])


def test_a_group_size_that_is_not_the_number_of_leaves_is_refused_before_anything_is_generated():
    run = Online()
    run.rollout = RolloutCallback(BuiltinBackend(steps=2, max_new_tokens=17, temperature=1.0, tree=[2, 3]))
    with pytest.raises(ValueError, match=r"makes 6 completions of each prompt, data.group_size=4"):
        run.fit()
