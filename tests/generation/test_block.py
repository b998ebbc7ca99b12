"""The block backend: rows at their own pace, replayed exactly by the trainer, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dare_lightning.datamodules.chat import encode_prompt
from dare_lightning.diffusion.trajectory import dense_steps, states_from_steps
from dare_lightning.evaluation.benchmarks.sudoku import SudokuTask
from dare_lightning.families.base import token_log_probs
from dare_lightning.families.load import load_policy
from dare_lightning.families.tiny import new_tiny_llada, new_tiny_llada2, new_tiny_sdar
from dare_lightning.generation.block import BlockBackend
from dare_lightning.generation.block_engine import Editing
from dare_lightning.generation.block_steps import (
    AboveThreshold,
    BlockPass,
    BlockSteps,
    ConstantQuota,
    EntropyBounded,
    MostConfident,
    Sequential,
)
from dare_lightning.generation.builtin import BuiltinBackend
from dare_lightning.replay.batch import SequenceBatch
from dare_lightning.rewards.sudoku import SudokuReward
from tests.shared import ROOT
from tests.tiny import EOS, MASK, PAD

# Shorter than a block, whole blocks, and blocks with a rest; two are equal.
PROMPTS = [[9, 8], [12, 9, 30, 31, 11, 14, 15, 20], [7, 21, 22, 23, 24], [7, 21, 22, 23, 24]]
SEEDS = [3, 4, 5, 6]


@pytest.fixture(scope="module")
def policy() -> Any:
    return new_tiny_sdar(layers=2, width=32, heads=2).double()


def generated(policy: Any, prompts: Any = PROMPTS, seeds: Any = SEEDS, **settings: Any) -> SequenceBatch:
    states = settings.pop("record_states", False)
    backend = BlockBackend(**({"max_new_tokens": 10, "temperature": 1.0} | settings))
    backend.validate(policy)
    backend.update_weights(policy, version=0)
    batch = backend.generate(prompts, seeds, record_states=states)
    policy.stats = backend.stats
    return batch


def responses(batch: SequenceBatch) -> list[list[int]]:
    return [ids[mask].tolist() for ids, mask in zip(batch.ids, batch.response_mask, strict=True)]


STEPS = [Sequential(2), MostConfident(3), AboveThreshold(0.05), EntropyBounded(6.0), ConstantQuota(0.05, least=2)]


@pytest.mark.parametrize("steps", STEPS, ids=lambda steps: type(steps).__name__)
@pytest.mark.parametrize("origin", ["global", "response"])
def test_the_trainer_finds_the_log_probs_that_the_rollout_wrote(policy: Any, steps: BlockSteps, origin: Any) -> None:
    batch = generated(policy, steps=steps, block_origin=origin)
    torch.testing.assert_close(replayed(policy, batch), batch.commit_log_probs)
    assert batch.block_origin == origin


def replayed(policy: Any, batch: SequenceBatch) -> torch.Tensor:
    """The log-probs that the trainer finds for the tokens in the states they were written in, [B, L]."""
    block = batch.block_ids(policy.block_length)
    step = dense_steps(batch.commit_step, block)
    rows = states_from_steps(batch.ids, batch.response_mask, step, batch.response_mask, MASK)
    found = torch.zeros(batch.ids.shape, dtype=torch.float64)
    for row in range(rows.count):
        found += token_log_probs(
            policy,
            rows.noisy_ids[:, row],
            batch.ids,
            batch.attention_mask,
            rows.score_mask[:, row],
            block_ids=block,
        )
    return found.float()


@pytest.mark.parametrize("editing", [None, Editing(0.0, 3)], ids=["as_written", "edited"])
def test_a_row_gets_what_it_gets_alone(policy: Any, editing: Editing | None) -> None:
    settings = {"steps": AboveThreshold(0.05), "editing": editing, "early_stop": "never"}
    together = generated(policy, **settings)
    assert len(set(together.forward_passes.tolist())) > 1
    for row in range(len(PROMPTS)):
        alone = generated(policy, [PROMPTS[row]], [SEEDS[row]], **settings)
        assert responses(alone)[0] == responses(together)[row]
        assert alone.forward_passes[0] == together.forward_passes[row]
    apart = generated(policy, max_batch_tokens=1, **settings)
    torch.testing.assert_close(apart.commit_log_probs, together.commit_log_probs)


def test_no_row_waits_for_another(policy: Any) -> None:
    batch = generated(policy, steps=AboveThreshold(0.05), early_stop="never")
    # Each block but a row's last one is read once more when it is final, at most; equal prompts are read once.
    blocks = [(len(p) % 4 + 10 + 3) // 4 for p in PROMPTS]
    own = [passes + count - 1 for passes, count in zip(batch.forward_passes.tolist(), blocks, strict=True)]
    prompts = len({tuple(p[: len(p) // 4 * 4]) for p in PROMPTS})
    assert policy.stats.row_forwards <= sum(own) + prompts
    assert policy.stats.forwards <= max(own) + 1


def test_blocks_that_end_together_are_read_again_with_the_next_ones(policy: Any) -> None:
    prompts = [PROMPTS[1], PROMPTS[1][::-1]]
    settings: dict[str, Any] = {"steps": MostConfident(2), "max_new_tokens": 12, "early_stop": "never"}
    batch = generated(policy, prompts, [3, 4], **settings)
    # The prompts, and three blocks of two steps; the first two are final and no pass reads them alone.
    assert policy.stats.forwards == 1 + 3 * 2
    assert policy.stats.row_forwards == 2 * (1 + 3 * 2)
    assert policy.stats.tokens == 2 * (8 + 3 * 2 * 4 + 2 * 4)
    torch.testing.assert_close(replayed(policy, batch), batch.commit_log_probs)


def test_every_step_of_a_block_writes_and_nothing_else_is_touched(policy: Any) -> None:
    batch = generated(policy, steps=AboveThreshold(0.05), record_states=True)
    local = dense_steps(batch.commit_step, batch.block_ids(4))
    start = batch.prompt_mask.sum(1)
    for row, prompt in enumerate(PROMPTS):
        assert batch.ids[row, batch.prompt_mask[row]].tolist() == prompt
        assert (start[row] + len(responses(batch)[row])) % 4 == 0
        written = batch.commit_step[row, batch.response_mask[row]]
        assert sorted(set(written.tolist())) == list(range(int(batch.forward_passes[row])))
    assert not (batch.ids == MASK).any()
    assert int(local.max()) <= 3
    for step in range(batch.states.shape[1]):
        hidden = batch.response_mask & (batch.commit_step >= step)
        made = batch.forward_passes > step
        assert torch.equal(batch.states[made, step], batch.ids.masked_fill(hidden, MASK)[made])
        proposed = batch.proposals[:, step] != batch.states[:, step]
        assert torch.equal(batch.confidence[:, step] > 0, proposed & made[:, None])


def test_tokens_that_only_complete_the_last_block_do_not_count(policy: Any) -> None:
    batch = generated(policy, early_stop="never", eos_policy="keep")
    assert batch.response_mask.sum(1).tolist() == [10, 12, 11, 11]
    assert batch.completion_mask.sum(1).tolist() == [10] * 4


@pytest.mark.parametrize("early_stop", ["block", "token", "never"])
def test_an_end_token_ends_the_answer(policy: Any, early_stop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"steps": Sequential(), "temperature": 0.0, "early_stop": early_stop}
    whole = responses(generated(policy, [PROMPTS[1]], [0], **settings))[0]
    place = next(i for i in range(1, len(whole)) if whole[i] not in whole[:i])
    monkeypatch.setattr(policy, "stop_token_ids", (whole[place],))
    batch = generated(policy, [PROMPTS[1]], [0], **settings)
    assert batch.ids[0, batch.completion_mask[0]].tolist() == whole[: place + 1]
    block = place // 4 * 4 + 4
    assert int(batch.forward_passes) == {"block": block, "token": place + 1, "never": 12}[early_stop]
    length = 12 if early_stop == "never" else block
    assert int(batch.response_mask.sum()) == length
    if early_stop == "token":
        assert responses(batch)[0] == whole[: place + 1] + [EOS] * (block - place - 1)
        assert (batch.commit_step[0, batch.response_mask[0]][place + 1 :] == -1).all()


def test_what_belongs_to_no_token_is_never_written(policy: Any) -> None:
    with torch.no_grad():
        rigged = new_tiny_sdar(layers=1, width=16, heads=2)
        rigged.lm_head = torch.nn.Linear(16, len(rigged.tokenizer) + 2)
        rigged.lm_head.bias[[MASK, -1, -2]] = 50.0
        for temperature in (0.0, 1.0):
            written = torch.tensor(responses(generated(rigged, temperature=temperature))[1])
            assert ((written != MASK) & (written < len(rigged.tokenizer))).all()


def test_editing_goes_on_until_nothing_changes_or_enough(policy: Any) -> None:
    steps = AboveThreshold(2.0)
    settings = {"steps": steps, "temperature": 0.0, "early_stop": "never", "record_states": True}
    plain = generated(policy, **settings)
    never = generated(policy, editing=Editing(1.0, 16), **settings)
    assert responses(never) == responses(plain)
    # One pass a block confirms that nothing changes.
    blocks = [len(set(ids[mask].tolist())) for ids, mask in zip(plain.block_ids(4), plain.response_mask, strict=True)]
    assert (never.forward_passes - plain.forward_passes).tolist() == blocks
    edited = generated(policy, editing=Editing(0.0, 2), **settings)
    assert (edited.forward_passes <= plain.forward_passes + 2 * torch.tensor(blocks)).all()
    changed = (edited.states[:, 1:] != edited.states[:, :-1]) & (edited.states[:, :-1] != MASK)
    made = torch.arange(edited.states.shape[1] - 1) + 1 < edited.forward_passes[:, None]
    assert (changed & made[..., None] & edited.response_mask[:, None]).any()
    assert not (changed & made[..., None] & edited.prompt_mask[:, None]).any()


def test_capabilities_say_what_the_settings_give() -> None:
    assert BlockBackend().capabilities.commit_steps
    assert not BlockBackend(editing=Editing()).capabilities.commit_steps
    assert not BlockBackend(eos_policy="truncate").capabilities.commit_steps
    assert BlockBackend(steps=Sequential()).capabilities.left_to_right
    assert not BlockBackend(steps=Sequential(2)).capabilities.left_to_right
    assert not BlockBackend(steps=MostConfident()).capabilities.left_to_right


def test_blocks_that_disagree_and_policies_without_blocks_are_refused(policy: Any) -> None:
    with pytest.raises(ValueError, match=r"block_length=8.*blocks of 4"):
        BlockBackend(block_length=8).validate(policy)
    with pytest.raises(ValueError, match=r"LLaDA is a masked policy.*rollout=builtin"):
        BlockBackend().validate(new_tiny_llada(layers=1, width=16, heads=2))
    with pytest.raises(ValueError, match="block-diffusion model"):
        BuiltinBackend().validate(policy)
    with pytest.raises(RuntimeError, match="update_weights"):
        BlockBackend().generate([[9]], [0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0.0}, r"top_p=0\.0"),
        ({"early_stop": "line"}, "early_stop='line' is not one of token, block, never"),
        ({"block_origin": "prompt"}, "block_origin='prompt' is not one of global, response"),
        ({"eos_policy": "cut"}, "eos_policy='cut'"),
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockBackend(**settings)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MostConfident(0), "steps=0"),
        (lambda: AboveThreshold(float("inf")), "threshold=inf"),
        (lambda: ConstantQuota(0.5, least=0), "least=0"),
        (lambda: EntropyBounded(0.0), r"bound=0\.0"),
        (lambda: Editing(-0.1), r"editing\.threshold=-0\.1.*null is off"),
        (lambda: Editing(0.5, -1), "max_post_steps=-1"),
    ],
)
def test_steps_out_of_range_are_named(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_no_strategy_takes_more_than_the_masks_that_are_left() -> None:
    masked = torch.tensor([[False, True, False, True], [True, True, True, True]])
    confidence = torch.tensor([[0.9, 0.2, 0.9, 0.3], [0.6, 0.1, 0.7, 0.4]])
    found = BlockPass(masked, confidence, 1 - confidence, torch.tensor([0, 0]))
    expected = {
        MostConfident(1): [[1, 3], [0, 1, 2, 3]],
        MostConfident(2): [[1, 3], [0, 2]],
        Sequential(4): [[1], [0]],
        AboveThreshold(0.5): [[3], [0, 2]],
        ConstantQuota(0.8, least=3): [[1, 3], [0, 2, 3]],
        EntropyBounded(1.0): [[3], [0, 2]],
    }
    for steps, columns in expected.items():
        assert [row.nonzero().flatten().tolist() for row in steps.select(found)] == columns


def test_progress_counts_blocks_and_ends_complete(policy: Any) -> None:
    told: list[tuple[int, int]] = []
    backend = BlockBackend(max_new_tokens=10, max_batch_tokens=40)
    backend.update_weights(policy, 0)
    backend.generate(PROMPTS, SEEDS, progress=lambda done, total: told.append((done, total)))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (12, 12)


def test_a_family_with_experts_decodes_in_a_batch_as_alone() -> None:
    policy = new_tiny_llada2(layers=2, width=16, heads=2).double()
    together = generated(policy, steps=AboveThreshold(0.05))
    for row in (0, 2):
        assert (
            responses(generated(policy, [PROMPTS[row]], [SEEDS[row]], steps=AboveThreshold(0.05)))[0]
            == (responses(together)[row])
        )
    assert together.ids[0, 0] == PAD


def test_the_policy_of_the_package_solves_some_puzzles_and_not_all() -> None:
    shipped: Any = load_policy(str(ROOT / "dare_lightning" / "assets" / "tiny_sudoku_block"))
    examples = SudokuTask(form="compact", empty=8).examples("heldout", 48, seed=42)
    prompts = [encode_prompt(shipped.tokenizer, example.messages) for example in examples]
    batch = generated(shipped, prompts, range(48), max_new_tokens=17, steps=MostConfident())
    texts = [shipped.tokenizer.decode(row[:16]) for row in responses(batch)]
    solved = sum(verdict.status == "right" for verdict in SudokuReward(form="compact")(texts, examples))
    assert 0 < solved < 40
