"""What a rollout makes of answers, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch

from dare_lightning.callbacks.rollout import RolloutCallback, completion_texts
from dare_lightning.generation.base import Capabilities, Progress
from dare_lightning.generation.builtin import BuiltinBackend
from dare_lightning.methods.coupled_grpo import CoupledGRPO
from dare_lightning.methods.d1 import D1
from dare_lightning.replay.batch import SequenceBatch
from dare_lightning.rewards.base import Example, Verdict
from tests.equalities.conftest import Offline, Online, Record, sampler
from tests.tiny import END_OF_TURN, EOS


class Scripted:
    """Pays the same rewards in every rollout, completion by completion; held-out answers get 0."""

    def __init__(self, *rewards: float) -> None:
        self.rewards = rewards

    def __call__(self, completions: Sequence[str], examples: Sequence[Example]) -> list[Verdict]:
        """One verdict for each completion."""
        rewards = self.rewards if len(completions) > 4 else [0.0] * len(completions)
        return [Verdict(reward, "right" if reward == 1 else "wrong") for reward in rewards]


def online(reward: Any, **settings: Any) -> Online:
    """One rollout of two prompts × four answers."""
    run = Online(**{"prompts_per_rollout": 2, "updates_per_rollout": 1, "inner_epochs": 1} | settings)
    run.data.reward = reward
    return run


def collected(run: Online) -> tuple[SequenceBatch, Record]:
    record = Record()
    run.fit(logger=record, max_epochs=1)
    assert run.data.buffer.batch is not None
    return run.data.buffer.batch, record


@pytest.mark.parametrize("micro_batch", [8, 4])
@pytest.mark.parametrize("method", [CoupledGRPO, D1])
def test_advantages_belong_to_the_prompt(method: Any, micro_batch: int) -> None:
    batch, record = collected(online(Scripted(1, 0, 0, 1, 1, 1, 1, 1), method=method, micro_batch=micro_batch))
    assert batch.advantage is not None
    assert batch.group_index is not None
    expected = 2 / 3 if method is CoupledGRPO else 0.5  # leave one out; minus the mean
    torch.testing.assert_close(batch.advantage[:4], expected * torch.tensor([1.0, -1, -1, 1]))
    assert batch.advantage[4:].tolist() == [0, 0, 0, 0]
    assert batch.group_index.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    (values,) = [step for step in record.steps.values() if "rollout/reward" in step]
    assert values["rollout/zero_variance_groups"] == 0.5
    assert values["rollout/reward"] == 0.75
    assert values["rollout/solve_rate"] == 0.75
    assert values["rollout/max_reward_in_group"] == 1
    assert values["rollout/distinct_in_group"] > 0.8
    assert values["rollout/log_prob_gap"] <= values["rollout/log_prob_gap_max"] < 1e-5


def test_groups_of_equal_rewards_leave_the_policy_as_it_was() -> None:
    run = online(Scripted(*[1.0] * 8))
    run.method.kl_coef = 0.0
    before = {name: value.clone() for name, value in run.policy.state_dict().items()}
    run.method.optimizer = lambda parameters: torch.optim.SGD(parameters, lr=1.0)
    _, record = collected(run)
    assert record.series("train/grad_norm") == [0.0]
    torch.testing.assert_close(dict(run.policy.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (Scripted(1, 0, 0), "the reward returned 3 verdicts for 8 completions"),
        (
            Scripted(0, 0, 0, 0, 0, float("nan"), 0, 0),
            r"the reward of sudoku\[\d+\] is nan; it must be a finite number",
        ),
        (Scripted(0, float("inf"), 0, 0, 0, 0, 0, 0), r"the reward of sudoku\[\d+\] is inf"),
    ],
)
def test_a_reward_that_is_no_reward_stops_the_run(reward: Scripted, message: str) -> None:
    run = online(reward)
    with pytest.raises(ValueError, match=message):
        run.fit(max_epochs=1)


class Short(BuiltinBackend):
    """Forgets the last two completions."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        progress: Progress | None = None,
        record_states: bool = False,
    ) -> SequenceBatch:
        batch = super().generate(prompts, seeds, progress, record_states)
        return batch.select(slice(0, len(batch) - 2))


def test_completions_that_do_not_fill_their_groups_are_refused() -> None:
    run = online(Scripted(*[0.0] * 8))
    run.rollout = RolloutCallback(Short(steps=2, max_new_tokens=17, temperature=1.0))
    with pytest.raises(ValueError, match="the backend returned 6 completions for 8 prompts"):
        run.fit(max_epochs=1)


class Blind(BuiltinBackend):
    """Cannot say when a token was written."""

    capabilities = Capabilities(stochastic=True, commit_steps=False, log_probs=False)


class Greedy(BuiltinBackend):
    """Known to ignore the temperature."""

    capabilities = Capabilities(stochastic=False, commit_steps=True, log_probs=True)


class NeedsSteps(CoupledGRPO):
    """A method that is undefined without the order of writing."""

    needs: ClassVar = ("commit_steps",)


def test_a_backend_that_lacks_what_the_method_needs_is_refused() -> None:
    run = online(Scripted(), method=NeedsSteps)
    run.rollout = RolloutCallback(Blind(steps=2, max_new_tokens=17, temperature=1.0))
    with pytest.raises(
        ValueError,
        match="NeedsSteps needs commit_steps from the rollout, which Blind does not give as it is set: tok",
    ):
        run.fit()


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (sampler(0.0), "temperature=0 makes the answers of a group equal"),
        (Greedy(steps=2, max_new_tokens=17, temperature=1.0), "Greedy ignores the temperature"),
    ],
)
def test_answers_that_cannot_differ_are_refused(backend: BuiltinBackend, message: str) -> None:
    run = online(Scripted())
    run.rollout = RolloutCallback(backend)
    with pytest.raises(ValueError, match=message):
        run.fit()


def test_fixed_data_are_refused() -> None:
    run = Offline()
    with pytest.raises(ValueError, match="a rollout needs prompts to ask; data is SFTDataModule"):
        run.fit(RolloutCallback(sampler()))


def test_text_ends_at_the_first_end_token() -> None:
    run = Online()
    written = run.policy.tokenizer.convert_tokens_to_ids(list("12"))
    ids = torch.tensor(
        [[7, *written, EOS, *written], [7, *written, *written, END_OF_TURN], [7, EOS, *written, EOS, EOS]]
    )
    exists = torch.ones_like(ids, dtype=torch.bool)
    response = exists.clone()
    response[:, 0] = False
    one = torch.arange(3)
    batch = SequenceBatch(ids, exists, response, response, one, one)
    ends = set(run.policy.stop_token_ids)
    assert completion_texts(run.policy, batch) == ["12", "1212", ""]
    assert EOS in ends
