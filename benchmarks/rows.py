"""Peak memory of a training step against the number of noisy rows: the gradient plan of a method's file, and `single`.

Rows are Monte Carlo samples, or steps of the rollout, each scored in the state before it. Each measurement is a process
of its own; what weights, gradients and interpreter take is subtracted.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dare_lightning.methods.base import DiffusionPolicyModule
    from dare_lightning.replay.batch import SequenceBatch

METHODS = ("bgpo", "cj_grpo", "mdpo", "tracerl", "dipo")
ROWS = (2, 4, 8, 16, 32)
PROMPT, ANSWER = 32, 64
SETTINGS = {"bgpo": "samples", "mdpo": "train_steps"}
"""The setting that says how many rows there are; of the others the rollout's steps say it."""


def peak(name: str, rows: int, single: bool) -> float:
    """Megabytes that a training step of four answers adds in this process."""
    import torch

    from benchmarks import training
    from dare_lightning.callbacks.peak_memory import peak_memory
    from tests.tiny import tiny_llada

    torch.set_num_threads(1)
    policy, cpu = tiny_llada(vocab=200, layers=4, width=128, heads=4), torch.device("cpu")
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    method, batch = prepared(name, policy, rows, single)
    # Buffers that are made once are not counted: a first call with a single answer and row.
    training.step(_method(name, policy, 1), [with_steps(batch.select(slice(0, 1)), 1, policy.mask_token_id)])
    before = peak_memory(cpu)
    step(method, batch)
    return peak_memory(cpu) - before


def prepared(name: str, policy: Any, rows: int, single: bool) -> tuple[DiffusionPolicyModule, SequenceBatch]:
    """The method under its own gradient plan or `single`, and a rollout for it."""
    from benchmarks import training

    method = _method(name, policy, rows)
    batch = with_steps(training.rollout(policy, prompts=1, longest=PROMPT, answer=ANSWER), rows, policy.mask_token_id)
    # What the rollout keeps is scored row by row, whatever the plan.
    method.rows_per_forward = 1
    batch = method.freeze_policies(batch, inner_epochs=1, keep_old=True)
    method.rows_per_forward = None if single else 1
    method.gradient_plan = "single" if single else method.gradient_plan
    return method, batch


def step(method: DiffusionPolicyModule, batch: SequenceBatch) -> float:
    """Forward and backward pass; the loss."""
    total = method.count(batch)
    loss, _ = method.loss_and_metrics(method.corrupt(batch), replace(batch, denominator=total))
    loss.backward()
    return float(loss.detach())


def _method(name: str, policy: Any, rows: int) -> DiffusionPolicyModule:
    """The method as its file in conf/ describes it, with so many rows."""
    from hydra.utils import instantiate

    from dare_lightning.cli.compose import compose

    settings = {SETTINGS[name]: rows} if name in SETTINGS else {}
    method: DiffusionPolicyModule = instantiate(compose("fit", [f"method={name}"]).method, policy=policy, **settings)
    method.keep_reference()
    return method


def with_steps(batch: SequenceBatch, steps: int, mask_token_id: int) -> SequenceBatch:
    """The columns of a rollout whose answers were written from the left in so many steps."""
    import torch

    order = batch.response_mask.cumsum(1) - 1
    step = torch.where(batch.response_mask, order * steps // ANSWER, -1)
    hidden = (step[:, None] >= torch.arange(steps)[:, None]) & batch.response_mask[:, None]
    return replace(
        batch,
        old_log_probs=None,
        ref_log_probs=None,
        commit_step=step,
        states=batch.ids[:, None].masked_fill(hidden, mask_token_id),
        proposals=batch.ids[:, None].expand(-1, steps, -1),
        confidence=torch.full(hidden.shape, 0.5),
        step_advantage=torch.linspace(-1, 1, len(batch) * steps).view(len(batch), steps),
    )


def run(quick: bool) -> list[dict[str, Any]]:
    """Measure every method and number of rows; `speedup` is the memory of `single` over that of the method's plan."""
    results = []
    for name in METHODS[:1] if quick else METHODS:
        for rows in ROWS[:2] if quick else ROWS:
            single, own = (measured(name, rows, flag) for flag in (True, False))
            results.append(
                {
                    "case": f"{name}, {rows} rows",
                    "unit": "MB",
                    "baseline": single,
                    "measured": own,
                    "speedup": single / max(own, 1e-9),
                }
            )
    return results


@cache
def _processes() -> ProcessPoolExecutor:
    """Each task gets a process of its own, forked from one that has imported what all need and computed nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.training", "dare_lightning.cli.build"])
    return ProcessPoolExecutor(max_workers=1, mp_context=context, max_tasks_per_child=1)


def measured(name: str, rows: int, single: bool) -> float:
    """`peak` in a process of its own."""
    return _processes().submit(peak, name, rows, single).result()
