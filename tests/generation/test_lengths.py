from __future__ import annotations

import json

import pytest
import torch

from dare_lightning.generation.builtin import BuiltinBackend
from dare_lightning.generation.canvas import masked_canvas
from dare_lightning.generation.layout import Layout
from dare_lightning.generation.lengths import Daedal, Outcome, RhoEos, end_score
from dare_lightning.generation.schedule import EvenSchedule
from dare_lightning.generation.threshold import ConfidenceThreshold
from tests.shared import golden_files
from tests.tiny import EOS, MASK, PAD

PROMPTS = [[5, 6, 7], [9, 8, 10, 11, 12], [14, 15]]
SEEDS = [1, 2, 3]
BASE = {
    "steps": None,
    "max_new_tokens": 24,
    "block_length": 8,
    "temperature": 1.0,
    "schedule": ConfidenceThreshold(0.5),
}
POLICIES = {
    "daedal": Daedal(initial=4, expansion=2, window=4, sufficient=0.2, complete=0.35, unsure=0.4),
    "rho": RhoEos(initial=8, expansion=2, growth="const", low=0.3, high=0.8, passes=4),
    "rho_tail": RhoEos(initial=8, expansion=2, growth="linear", low=0.2, high=0.4, density="tail", window=4, passes=4),
}


@pytest.fixture(params=list(POLICIES))
def settings(request, policy):
    """The end of text is likely at some places and not at others, so that lengths differ."""
    with torch.no_grad():
        head = policy.get_parameter("model.transformer.ff_out.weight")
        hidden = policy.hidden_states(torch.tensor([[5, 6, 7] + [4] * 16])).mean((0, 1))
        head[EOS] += 3.5 * hidden / hidden.norm() ** 2
    return BASE | {"lengths": POLICIES[request.param]}


def test_a_row_gets_the_length_and_the_tokens_that_it_would_get_alone(backend, settings):
    prompts, seeds = [[5 + i, 6, 7 + i][: 2 + i % 2] for i in range(8)], list(range(8))
    settings["early_stop"] = False
    together = backend(**settings).generate(prompts, seeds)
    assert len(set(together.response_mask.sum(1).tolist())) > 1
    for row, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        alone = backend(**settings).generate([prompt], [seed])
        for column in ("ids", "commit_step"):
            found = getattr(together, column)[row][together.attention_mask[row]]
            assert torch.equal(found, getattr(alone, column)[0][alone.attention_mask[0]]), column
        assert int(together.forward_passes[row]) == int(alone.forward_passes[0])


def test_what_exists_is_exactly_prompt_and_response(backend, settings):
    batch = backend(**settings).generate(PROMPTS, SEEDS)
    assert torch.equal(batch.attention_mask, batch.prompt_mask | batch.response_mask)
    for row, prompt in enumerate(PROMPTS):
        assert batch.ids[row][batch.prompt_mask[row]].tolist() == prompt
    assert not bool((batch.ids == MASK).any())
    assert bool((batch.ids[~batch.attention_mask] == PAD).all())
    assert bool((batch.commit_step[~batch.response_mask] == -1).all())
    assert bool((batch.response_mask.sum(1) <= 24).all())


def test_the_policy_never_reads_behind_the_longest_row(backend, settings, policy, monkeypatch):
    read = []
    original = policy.hidden_states

    def reading(ids, attention_mask=None):
        read.append((ids, attention_mask))
        return original(ids, attention_mask)

    monkeypatch.setattr(policy, "hidden_states", reading)
    backend(**settings).generate(PROMPTS, SEEDS)
    for ids, mask in read:
        assert bool(mask[:, -1].any())
        assert bool((ids[~mask] == PAD).all())


def test_settings_say_that_tokens_move(backend, settings):
    built = backend(**settings)
    offered = built.capabilities
    assert not offered.states
    assert not offered.commit_steps
    with pytest.raises(ValueError, match="set cache and lengths to null"):
        built.generate(PROMPTS, SEEDS, record_states=True)


def test_a_response_that_needs_no_more_room_keeps_its_length(backend):
    lengths = Daedal(initial=8, window=2, sufficient=0.0, complete=0.0)
    batch = backend(**BASE | {"lengths": lengths, "early_stop": False}).generate(PROMPTS, SEEDS)
    assert batch.response_mask.sum(1).tolist() == [9, 9, 9]  # and a tail of window / 2
    steady = RhoEos(initial=8, low=0.0, high=1.0)
    batch = backend(**BASE | {"lengths": steady, "early_stop": False}).generate(PROMPTS, SEEDS)
    assert batch.response_mask.sum(1).tolist() == [8, 8, 8]


def test_an_end_that_never_comes_grows_the_response_to_the_most_there_may_be(backend, policy):
    with torch.no_grad():
        policy.get_parameter("model.transformer.ff_out.weight")[EOS] = 0.0
    for lengths in (Daedal(initial=8), RhoEos(initial=8)):
        built = backend(**BASE | {"lengths": lengths, "early_stop": False})
        assert built.generate(PROMPTS, SEEDS).response_mask.sum(1).tolist() == [24, 24, 24]


@pytest.mark.parametrize("path", golden_files("generation/units-masked.json"))
def test_lengths_change_by_the_published_amounts(path):
    unit = json.loads(path.read_text())["rho_eos_factor"]
    for case in unit["cases"]:
        policy = RhoEos(expansion=case["base"], growth=case["scheduler"], low=case["low"], high=case["high"])
        sign = torch.tensor([0, -1, 1])[torch.tensor(case["action_0keep_1contract_2expand"])]
        assert torch.equal(policy.change(torch.tensor(unit["density"])), sign * torch.tensor(case["K"]))


def test_the_end_score_counts_the_last_columns_that_predict_the_end():
    ends = torch.tensor([[0.9, 0.0, 0.5, 0.0, 0.25], [0.0, 0.0, 0.0, 0.4, 0.0]])
    assert end_score(ends, 2).tolist() == [0.375, pytest.approx(0.2)]


def variable_canvas():
    canvas = masked_canvas([[5], [6]], Layout((0, 8), (0, 0)), MASK, PAD, torch.device("cpu"))
    canvas.vary(4, 2, probes=False)
    return canvas


def test_inserted_columns_move_the_tail_and_what_it_remembers():
    canvas = variable_canvas()
    canvas.commit(torch.tensor([0]), torch.arange(8)[None] == 3, torch.full((1, 8), 9), torch.full((1, 8), -0.5))
    canvas.insert(torch.tensor([0]), torch.tensor([1]), 3, MASK)
    assert canvas.response[0].tolist() == [MASK] * 6 + [9, PAD]
    assert canvas.commit_step[0].tolist() == [-1] * 6 + [0, -1]
    assert canvas.commit_log_probs[0].tolist() == [0.0] * 6 + [-0.5, 0.0]
    assert canvas.masked[0].tolist() == [True] * 6 + [False] * 2
    assert canvas.length.tolist() == [7, 4]
    assert canvas.attention_mask.sum(1).tolist() == [8, 5]


def test_what_is_pushed_over_the_end_is_lost():
    canvas = variable_canvas()
    canvas.commit(torch.tensor([0]), torch.arange(8)[None] == 3, torch.full((1, 8), 9), torch.zeros(1, 8))
    canvas.insert(torch.tensor([0]), torch.tensor([0]), 5, MASK)
    assert canvas.response[0].tolist() == [MASK] * 8
    assert canvas.length[0] == 8


def test_cut_columns_leave_nothing_behind_and_one_always_stays():
    canvas = variable_canvas()
    canvas.commit(torch.tensor([1]), torch.arange(8)[None] == 3, torch.full((1, 8), 9), torch.full((1, 8), -0.5))
    canvas.resize(torch.tensor([0, 1]), torch.tensor([-3, 2]), MASK)
    assert canvas.length.tolist() == [1, 2]
    assert canvas.masked.sum(1).tolist() == [1, 2]
    assert canvas.commit_step[1].tolist() == [-1] * 8
    canvas.resize(torch.tensor([1]), torch.tensor([4]), EOS, masks=False)
    assert canvas.response[1, :4].tolist() == [MASK, MASK, EOS, EOS]
    assert not bool(canvas.masked[1, 2:].any())


def test_room_is_made_at_the_one_mask_the_policy_is_least_sure_of():
    canvas = variable_canvas()
    open_ = torch.arange(8)[None] < 2
    score = torch.tensor([[0.05, 0.02, 0.01, 0, 0, 0, 0, 0]])
    outcome = Outcome(torch.tensor([0]), open_, canvas.masked[:1], torch.zeros(1, 8) > 0, score, torch.zeros(1, 8))
    Daedal(initial=4, expansion=3).adjust(canvas, outcome, MASK, EOS)
    assert canvas.length.tolist() == [6, 4]
    sure = Outcome(torch.tensor([1]), open_, canvas.masked[1:], torch.zeros(1, 8) > 0, score + 0.5, torch.zeros(1, 8))
    Daedal(initial=4, expansion=3).adjust(canvas, sure, MASK, EOS)
    assert canvas.length.tolist() == [6, 4]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": EvenSchedule()}, "changes how many masks there are, EvenSchedule spreads a known number"),
        ({"schedule": None}, "EvenSchedule spreads a known number"),
        ({"steps": 8}, "steps=8 means nothing to ConfidenceThreshold"),
        ({"lengths": Daedal(initial=32)}, "initial=32 is more than max_new_tokens=24"),
        ({"block_length": 25}, "block_length=25 must lie in 1 to max_new_tokens=24"),
        ({"suppress_eos": True}, "suppress_eos=True does not go with lengths"),
        ({"tree": [2]}, r"tree=\[2\] does not go with lengths"),
        ({"running_confidence": True}, "running_confidence=True does not go with lengths"),
    ],
)
def test_settings_that_do_not_go_with_lengths_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        BuiltinBackend(**BASE | {"lengths": Daedal(initial=8)} | settings)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Daedal(expansion=0), "expansion=0 must be at least 1"),
        (lambda: Daedal(sufficient=1.5), r"sufficient=1.5 must lie in \[0, 1\]"),
        (lambda: RhoEos(low=0.7), "low=0.7, high=0.6: the band must be ordered"),
        (lambda: RhoEos(growth="fast"), "growth='fast' is not one of const, linear, exp"),
        (lambda: RhoEos(density="real"), "density='real' is not one of predicted, tail"),
        (lambda: RhoEos(passes=0), "passes=0 must be at least 1"),
    ],
)
def test_values_out_of_range_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_policy_on_the_gpu_finds_the_same_lengths(backend, settings, policy):
    expected = backend(**settings).generate(PROMPTS, SEEDS)
    found = backend(policy.cuda(), **settings).generate(PROMPTS, SEEDS)
    assert torch.equal(expected.ids, found.ids)
    assert torch.equal(expected.response_mask, found.response_mask)
