"""Seconds of a training step, against the same step without what saves time in it.

Baseline and measured step start from the same weights and must give the same loss; both run in turn, and the median of
each is compared, so that a busy moment of the machine does not favour one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dare_lightning.diffusion.noise import generator
from dare_lightning.families.llada import LLaDA
from dare_lightning.methods.coupled_grpo import CoupledGRPO
from dare_lightning.methods.d1 import D1
from dare_lightning.replay.batch import SequenceBatch
from tests.tiny import tiny_llada

Step = Callable[[], Tensor]
GROUP = 4
"""Answers to one prompt."""


def rollout(policy: LLaDA, prompts: int, longest: int, answer: int, seed: int = 0) -> SequenceBatch:
    """A rollout as a backend returns it: prompts of random length, from a quarter of `longest`, padded on the left."""
    draws = generator(seed)
    rows, length = prompts * GROUP, longest + answer
    lengths = torch.randint(longest // 4, longest + 1, (prompts,), generator=draws)
    lengths[0] = longest
    column = torch.arange(length)
    first = (longest - lengths).repeat_interleave(GROUP)
    prompt_ids = torch.randint(5, 40, (prompts, length), generator=draws).repeat_interleave(GROUP, 0)
    answer_ids = torch.randint(5, 40, (rows, length), generator=draws)
    exists = column >= first[:, None]
    response = (column >= longest).expand(rows, -1)
    ids = torch.where(response, answer_ids, prompt_ids)
    return SequenceBatch(
        ids=torch.where(exists, ids, policy.pad_token_id),
        attention_mask=exists,
        response_mask=response,
        completion_mask=response,
        noise_seed=torch.arange(rows),
        sample_index=torch.arange(rows),
        group_index=torch.arange(prompts).repeat_interleave(GROUP),
        advantage=torch.randn(rows, generator=draws),
    )


def step(method: Any, micro_batches: list[SequenceBatch]) -> Tensor:
    """Forward and backward pass of one optimiser step; the loss."""
    total = torch.stack([method.count(batch) for batch in micro_batches]).sum(0)
    losses = []
    for batch in micro_batches:
        loss, _ = method.loss_and_metrics(method.corrupt(batch), replace(batch, denominator=total))
        loss.backward()
        losses.append(loss.detach())
    method.policy.zero_grad()
    return torch.stack(losses).sum()


def compare(case: str, baseline: Step, measured: Step, repeats: int) -> dict[str, Any]:
    """Median seconds of both, in turn, after one call of each.

    Raises:
        AssertionError: they computed different losses.
    """
    torch.testing.assert_close(baseline(), measured(), rtol=1e-3, atol=1e-4)
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for step_of, kept in zip((baseline, measured), seconds, strict=True):
            started = time.perf_counter()
            step_of()
            kept.append(time.perf_counter() - started)
    before, after = (statistics.median(kept) for kept in seconds)
    return {"case": case, "unit": "s a step", "baseline": before, "measured": after, "speedup": before / after}


def run(quick: bool) -> list[dict[str, Any]]:
    """Measure every case; `speedup` is baseline seconds over measured seconds.

    Returns:
        one dict a case: case, unit, baseline, measured, speedup.
    """
    size: dict[str, Any] = {"layers": 2, "width": 64} if quick else {"layers": 4, "width": 256}
    prompts, longest, answer, repeats = (4, 64, 32, 3) if quick else (8, 256, 64, 7)
    policy = tiny_llada(vocab=512, heads=4, **size)
    method = CoupledGRPO(policy, partial(torch.optim.AdamW, lr=1e-3))
    batch = rollout(policy, prompts, longest, answer)
    return [
        compare("columns without tokens dropped", *_trimmed(method, batch), repeats),
        compare("one answer length, no padding at all", *_trimmed(method, _of_one_prompt(batch)), repeats),
        compare("attention sdpa instead of eager", *_attention(method, batch), repeats),
        compare("rows that read the same scored once", *_distinct(policy, batch), repeats),
    ]


def _trimmed(method: Any, batch: SequenceBatch) -> tuple[Step, Step]:
    """A prompt's answers in one micro-batch: as padded in the rollout, and trimmed."""
    padded = [batch.select(rows) for rows in torch.arange(len(batch)).split(GROUP)]
    trimmed = [part.trim() for part in padded]
    return partial(step, method, padded), partial(step, method, trimmed)


def _of_one_prompt(batch: SequenceBatch) -> SequenceBatch:
    """The rows of the longest prompt: nothing to drop, so the ratio shows what trimming itself costs."""
    return batch.select(slice(0, GROUP))


def _attention(method: Any, batch: SequenceBatch) -> tuple[Step, Step]:
    def with_kernel(name: str) -> Tensor:
        method.policy.attention = name
        return step(method, [batch])

    return partial(with_kernel, "eager"), partial(with_kernel, "sdpa")


def _distinct(policy: LLaDA, batch: SequenceBatch) -> tuple[Step, Step]:
    """D1 hides the whole response: with the prompt in sight, the answers of a group are one and the same input."""
    method = D1(policy, partial(torch.optim.AdamW, lr=1e-3), prompt_mask_probability=0.0)

    def every_row() -> Tensor:
        # The same loss from a forward pass over all rows, equal or not.
        rows = method.corrupt(batch)
        hidden = policy.denoise(rows.noisy_ids[:, 0], batch.ids, batch.attention_mask)
        logits = policy.logits(hidden[rows.score_mask[:, 0]]).float()
        chosen = logits.log_softmax(-1).gather(-1, batch.ids[rows.score_mask[:, 0]][:, None]).squeeze(-1)
        scored = chosen.new_zeros(batch.ids.shape).masked_scatter(rows.score_mask[:, 0], chosen)[:, None]
        output = method.policy_loss(
            method.log_likelihood(scored, rows, batch), scored.detach().squeeze(1), None, rows, batch
        )
        loss = (output.total.reshape(-1) / method.denominator(rows, batch).to(output.total.dtype)).sum()
        loss.backward()
        policy.zero_grad()
        return loss.detach()

    return every_row, partial(step, method, [batch])
