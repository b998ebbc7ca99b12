"""Methods on the rollout's own steps, from real rollouts through the trainer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from dare_lightning.callbacks.rng_state import RngState
from dare_lightning.callbacks.rollout import RolloutCallback
from dare_lightning.datamodules.prompts import PromptDataModule
from dare_lightning.evaluation.benchmarks.sudoku import SudokuTask
from dare_lightning.generation.builtin import BuiltinBackend
from dare_lightning.methods.cj_grpo import CJGRPO
from dare_lightning.methods.d_tree_rpo import DTreeRPO
from dare_lightning.methods.diffpo import DiFFPO
from dare_lightning.methods.dipo import DiPO
from dare_lightning.methods.justgrpo import JustGRPO
from dare_lightning.methods.mdpo import MDPO
from dare_lightning.methods.tracerl import TraceRL
from tests.equalities.conftest import Record, trainer, variety
from tests.tiny import tiny_llada

TOKENS = 8
# Settings of the method, then of the rollout.
RUNS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "cj_grpo": (CJGRPO, {}, {"steps": 4}),
    "cj_grpo_some_steps": (CJGRPO, {"max_train_steps": 2}, {"steps": 4, "block_length": 4}),
    "tracerl": (TraceRL, {"kl_coef": 0.01, "shrink": 2}, {"steps": 4}),
    "dipo": (DiPO, {"kl_coef": 0.1}, {"steps": 4}),
    "diffpo": (DiFFPO, {}, {"steps": 4}),
    "justgrpo": (JustGRPO, {}, {"steps": TOKENS, "block_length": 1}),
    "mdpo": (MDPO, {"train_steps": 2}, {"steps": 4}),
    "mdpo_hidden_again": (MDPO, {"train_steps": 3}, {"steps": 4, "running_confidence": True, "early_stop": False}),
    "d_tree_rpo": (
        DTreeRPO,
        {"kl_coef": 0.01, "denoising_steps": 4, "distillation": 0.1},
        {"steps": 4, "tree": [2, 2]},
    ),
}


def _run(method: Any, settings: dict[str, Any], rollout: dict[str, Any], **data: Any) -> tuple[Any, Record]:
    """Two rollouts of 4 prompts × 4 answers, 2 updates each."""
    policy = tiny_llada(width=16)
    shapes: dict[str, Any] = {"group_size": 4, "prompts_per_rollout": 4, "updates_per_rollout": 2, "micro_batch": 4}
    prompts = PromptDataModule(
        policy, variety, task=SudokuTask(form="compact"), train_prompts=8, val_prompts=2, **shapes | data
    )
    plan = {"gradient_plan": "accumulate", "rows_per_forward": 2}
    module = method(policy=policy, optimizer=partial(torch.optim.AdamW, lr=1e-2), **plan, **settings)
    backend = BuiltinBackend(max_new_tokens=TOKENS, temperature=1.0, **rollout)
    record = Record()
    fit = trainer([RolloutCallback(backend), RngState()], limit_val_batches=0, logger=record)
    fit.accumulate_grad_batches = prompts.micro_batches_per_step(fit.world_size)
    fit.fit(module, datamodule=prompts)
    return module, record


@pytest.mark.parametrize(("method", "settings", "rollout"), RUNS.values(), ids=RUNS.keys())
def test_a_method_trains_on_real_rollouts(method: Any, settings: Any, rollout: Any) -> None:
    module, record = _run(method, settings, rollout)
    start = tiny_llada(width=16).state_dict()
    assert any(not torch.equal(value, start[name]) for name, value in module.policy.state_dict().items())
    losses, ratios = record.series("train/loss"), record.series("train/ratio_mean")
    assert len(losses) == 4
    assert all(torch.tensor(losses).isfinite())
    assert ratios[0] == pytest.approx(1, abs=1e-4)
    assert abs(ratios[1] - 1) > 1e-4


def test_the_states_that_are_rebuilt_are_those_the_sampler_read() -> None:
    policy = tiny_llada(width=16)
    backend = BuiltinBackend(steps=6, max_new_tokens=12, block_length=6, temperature=1.0)
    backend.update_weights(policy, version=0)
    batch = backend.generate([[5, 6, 7], [9, 9, 8, 7, 6]], [1, 2], record_states=True)
    module = CJGRPO(policy=policy, optimizer=partial(torch.optim.SGD, lr=0.1), count_after_eos=True)
    rows = module.corrupt(batch)
    assert batch.states is not None
    assert batch.forward_passes is not None
    for row, passes in enumerate(batch.forward_passes.tolist()):
        there = batch.attention_mask[row]
        assert torch.equal(rows.noisy_ids[row, :passes, there], batch.states[row, :passes, there])
    # And the log-probs are those at which the sampler wrote.
    scored = module.log_likelihood(module.frozen_log_probs(policy, rows, batch), rows, batch)
    assert batch.commit_log_probs is not None
    torch.testing.assert_close(scored, batch.commit_log_probs, rtol=1e-4, atol=1e-4)


def test_a_left_to_right_rollout_is_scored_as_it_was_written() -> None:
    policy = tiny_llada(width=16)
    backend = BuiltinBackend(steps=6, max_new_tokens=6, block_length=1, temperature=1.0)
    backend.update_weights(policy, version=0)
    batch = backend.generate([[5, 6, 7]], [3])
    module = JustGRPO(policy=policy, optimizer=partial(torch.optim.SGD, lr=0.1))
    rows = module.corrupt(batch)
    scored = module.log_likelihood(module.frozen_log_probs(policy, rows, batch), rows, batch)
    assert batch.commit_log_probs is not None
    expected = batch.commit_log_probs * batch.completion_mask
    torch.testing.assert_close(scored, expected, rtol=1e-4, atol=1e-4)


def test_a_tree_is_scored_in_the_states_where_it_branched() -> None:
    policy = tiny_llada(width=16)
    backend = BuiltinBackend(steps=4, max_new_tokens=TOKENS, temperature=1.0, tree=[2, 2])
    backend.update_weights(policy, version=0)
    batch = backend.generate([[5, 6, 7]] * 4, [3, 4, 5, 6], record_states=True)
    module = DTreeRPO(policy=policy, optimizer=partial(torch.optim.SGD, lr=0.1), denoising_steps=4)
    group, reward = torch.zeros(4, dtype=torch.int64), torch.tensor([1.0, 0.5, 0.25, 0.0])
    rows = module.corrupt(module.credit(replace(batch, reward=reward, group_index=group)))
    assert batch.states is not None
    assert batch.forward_passes is not None
    for row in range(4):
        assert torch.equal(rows.noisy_ids[row, 0], batch.states[row, 0])
        if int(batch.forward_passes[row]) > 2:
            assert torch.equal(rows.noisy_ids[row, 1], batch.states[row, 2])


def test_a_rollout_without_what_a_method_needs_is_refused() -> None:
    with pytest.raises(ValueError, match="JustGRPO needs left_to_right from the rollout"):
        _run(JustGRPO, {}, {"steps": 4})
    with pytest.raises(ValueError, match="DTreeRPO needs tree from the rollout"):
        _run(DTreeRPO, {"denoising_steps": 4}, {"steps": 4})
    with pytest.raises(ValueError, match="CJGRPO needs commit_steps from the rollout"):
        _run(CJGRPO, {}, {"steps": 4, "running_confidence": True, "early_stop": False})
    with pytest.raises(ValueError, match="makes 4 completions of each prompt, data.group_size=2"):
        _run(DTreeRPO, {"denoising_steps": 4}, {"steps": 4, "tree": [2, 2]}, group_size=2)
