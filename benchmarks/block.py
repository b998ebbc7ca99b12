"""Block-diffusion policies: decoding, a supervised step and a step of reinforcement, against the plain way.

The plain way recomputes the whole prefix for every denoising step, rows waiting for each other; trains on one dense
pass over [noisy ; clean] of each noisy row, attention written out; and computes the logits of every position.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dare_lightning.diffusion.rows import Rows
from dare_lightning.families.attention import View
from dare_lightning.families.base import using_attention
from dare_lightning.families.block import count_blocks
from dare_lightning.families.cost import Cost
from dare_lightning.families.sdar import SDAR
from dare_lightning.families.tiny import character_tokenizer, sdar_config
from dare_lightning.generation.block import BlockBackend
from dare_lightning.generation.block_steps import MostConfident
from dare_lightning.methods.cj_grpo import CJGRPO
from dare_lightning.methods.sft import SFT
from dare_lightning.replay.batch import SequenceBatch

VOCABULARY = 4096
BLOCK = 4


def run(quick: bool) -> list[dict[str, Any]]:
    """Measure every case; `speedup` is the plain way's seconds over ours.

    Returns:
        one dict a case: case, unit, baseline, measured, speedup.
    """
    layers, width, rows = (1, 32, 2) if quick else (3, 128, 4)
    config = sdar_config(layers, width, 4, BLOCK, VOCABULARY)
    policy = SDAR.from_config(config, character_tokenizer(), seed=0)
    new, columns, answer = (16, 64, 16) if quick else (512, 1024, 256)
    prompts = [torch.randint(7, 100, (60 + 3 * row,)).tolist() for row in range(rows)]
    return [
        decoding(policy, prompts, new),
        supervised(policy, columns),
        reinforcement(policy, [prompts[0]] * 2 * rows, answer),
    ]


def decoding(policy: SDAR, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Greedy decoding, one token a pass: both ways write the same tokens, but for rounding where two are as likely."""
    backend = BlockBackend(new_tokens, steps=MostConfident(), early_stop="never")
    backend.update_weights(policy, 0)
    backend.generate(prompts[:1], [0])
    measured = timed(lambda: backend.generate(prompts, range(len(prompts))))
    baseline = timed(lambda: plain_decode(policy, prompts, new_tokens))
    return result(f"decoding {new_tokens} tokens, {len(prompts)} rows", baseline, measured)


@torch.no_grad()
def plain_decode(policy: SDAR, prompts: list[list[int]], new_tokens: int) -> list[Tensor]:
    """All rows at the same block, the whole prefix at every step, all logits."""
    starts = [len(prompt) // BLOCK * BLOCK for prompt in prompts]
    ends = [
        max(starts) - start + -(-(len(prompt) + new_tokens) // BLOCK) * BLOCK
        for start, prompt in zip(starts, prompts, strict=True)
    ]
    ids = torch.full((len(prompts), max(ends)), policy.pad_token_id)
    exists = torch.zeros_like(ids, dtype=torch.bool)
    for row, (start, end, prompt) in enumerate(zip(starts, ends, prompts, strict=True)):
        first = max(starts) - start
        ids[row, first:end] = policy.mask_token_id
        ids[row, first : first + len(prompt)] = torch.tensor(prompt)
        exists[row, first:end] = True
    with using_attention(policy, "eager"):
        for end in range(max(starts) + BLOCK, max(ends) + 1, BLOCK):
            window, there = ids[:, :end], exists[:, :end]
            while bool((open_ := window == policy.mask_token_id).any()):
                logits = policy(window, there)
                share = logits.softmax(-1)
                logits[..., policy.mask_token_id] = -torch.inf
                logits[..., len(policy.tokenizer) :] = -torch.inf
                token = logits.argmax(-1)
                sure = share.gather(-1, token[..., None])[..., 0]
                best = sure.masked_fill(~open_, -1.0).argmax(1)
                rows = open_.any(1).nonzero().flatten()
                window[rows, best[rows]] = token[rows, best[rows]]
    return [row[there] for row, there in zip(ids, exists, strict=True)]


def supervised(policy: SDAR, columns: int) -> dict[str, Any]:
    """One supervised step on two sequences, a quarter of them prompt."""
    policy.train()
    batch = fixed(torch.randint(7, 100, (2, columns)), columns // 4)
    module = SFT(policy, partial(torch.optim.SGD, lr=0.1), level_scope="block", normalization="token")
    rows = module.corrupt(batch)
    counted = replace(batch, denominator=module.denominator(rows, batch))

    def ours() -> None:
        module.loss_and_metrics(rows, counted)[0].backward()

    def plain() -> None:
        scored = plain_log_probs(policy, rows, batch)
        (-(scored * rows.weight).sum() / counted.denominator.sum()).backward()  # type: ignore[union-attr]

    ours()
    measured, baseline = timed(ours), timed(plain)
    return result(f"supervised step, 2 x {columns} tokens", baseline, measured)


def reinforcement(policy: SDAR, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """One step of CJ-GRPO end to end: rollout and update; ours needs no old log-probs where one update follows."""
    backend = BlockBackend(new_tokens, steps=MostConfident(), temperature=1.0, early_stop="never")
    backend.update_weights(policy, 0)
    module = CJGRPO(policy, partial(torch.optim.SGD, lr=0.1))

    def rewarded(batch: SequenceBatch) -> SequenceBatch:
        group = torch.zeros(len(batch), dtype=torch.int64)
        reward = torch.linspace(0, 1, len(batch))
        return module.credit(replace(batch, group_index=group, reward=reward))

    def ours() -> None:
        batch = rewarded(backend.generate(prompts, range(len(prompts))))
        batch = module.freeze_policies(batch, 1, keep_old=False)
        batch = replace(batch, denominator=module.count(batch))
        module.loss_and_metrics(module.corrupt(batch), batch)[0].backward()

    written = rewarded(backend.generate(prompts, range(len(prompts))))

    def plain() -> None:
        plain_decode(policy, prompts, new_tokens)
        rows = module.corrupt(written)
        with torch.no_grad():
            old = plain_log_probs(policy, rows, written)[:, None]
        batch = replace(written, old_log_probs=old, denominator=module.count(written))
        scored = plain_log_probs(policy, rows, batch)
        output = module.policy_loss(
            module.log_likelihood(scored, rows, batch), module.log_likelihood(old[:, 0], rows, batch), None, rows, batch
        )
        (output.total.sum() / batch.denominator.sum()).backward()  # type: ignore[union-attr]

    measured, baseline = timed(ours), timed(plain)
    return result(f"reinforcement step, {len(prompts)} answers of {new_tokens} tokens", baseline, measured)


def plain_log_probs(policy: SDAR, rows: Rows, batch: SequenceBatch) -> Tensor:
    """Row log-probs [B, N, L]: each row in a dense pass of its own, logits of all positions."""
    scored = []
    with using_attention(policy, "eager"):
        for number in range(rows.count):
            noisy, exists = rows.noisy_ids[:, number], batch.attention_mask
            block = count_blocks(batch.ids, exists, BLOCK)
            same, later = block[:, :, None] == block[:, None], block[:, :, None] > block[:, None]
            pairs = torch.cat([torch.cat([same, later], 2), torch.cat([torch.zeros_like(same), same | later], 2)], 1)
            there = torch.cat([exists, exists], 1)
            position = (exists.cumsum(1) - 1).clamp(min=0).repeat(1, 2)
            view = View(position, pairs & there[:, None])
            hidden = policy.hidden_states(torch.cat([noisy, batch.ids], 1), None, view)
            log_probs = policy.logits(hidden)[:, : noisy.shape[1]].log_softmax(-1)
            scored.append(log_probs.gather(-1, batch.ids[..., None])[..., 0] * rows.score_mask[:, number])
    return torch.stack(scored, 1)


def fixed(ids: Tensor, prompt: int) -> SequenceBatch:
    """Sequences whose answers begin at column `prompt`."""
    exists = torch.ones_like(ids, dtype=torch.bool)
    response = exists & (torch.arange(ids.shape[1]) >= prompt)
    number = torch.arange(len(ids))
    return SequenceBatch(ids, exists, response, response, noise_seed=number, sample_index=number)


class Timed(NamedTuple):
    """Attributes: seconds of a piece of work, the forward passes it made and the tokens that these read."""

    seconds: float
    passes: int
    tokens: int


def timed(work: Callable[[], Any]) -> Timed:
    """What a piece of work cost."""
    cost = Cost()
    started = time.perf_counter()
    with cost.spent_on("work"):
        work()
    return Timed(time.perf_counter() - started, cost.passes("work"), cost.tokens("work"))


def result(case: str, baseline: Timed, measured: Timed) -> dict[str, Any]:
    """A line of the table."""
    work = ", ".join(
        f"{name} {found.passes:,} passes over {found.tokens:,} tokens"
        for name, found in (("plain", baseline), ("ours", measured))
    )
    return {
        "case": f"{case} ({work})",
        "unit": "s",
        "baseline": baseline.seconds,
        "measured": measured.seconds,
        "speedup": baseline.seconds / measured.seconds,
        "passes": [baseline.passes, measured.passes],
        "tokens_read": [baseline.tokens, measured.tokens],
    }
