"""Seconds of a supervised step on rows of GSM8K's lengths: packed and scored where needed, against padded and plain.

The plain step pads to the longest row, writes attention out and computes the logits of every position, as short
training scripts do. Both see the same noisy rows and must give the same loss.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.training import Step, compare
from dare_lightning.diffusion.noise import generator
from dare_lightning.families.base import using_attention
from dare_lightning.families.llada import LLaDA
from dare_lightning.methods.sft import SFT
from dare_lightning.replay.batch import SequenceBatch
from tests.tiny import tiny_llada

# Prompt and answer tokens of 64 rows at even ranks of total length, of GSM8K's training set with Qwen's vocabulary and
# a chat template. fmt: off
GSM8K_LENGTHS = (
    (57, 49),
    (64, 50),
    (66, 52),
    (61, 61),
    (58, 67),
    (71, 57),
    (62, 70),
    (58, 77),
    (63, 75),
    (64, 77),
    (69, 75),
    (81, 66),
    (75, 75),
    (67, 85),
    (68, 86),
    (85, 71),
    (71, 87),
    (81, 79),
    (86, 77),
    (87, 79),
    (85, 83),
    (75, 95),
    (58, 114),
    (68, 107),
    (75, 102),
    (83, 97),
    (78, 104),
    (102, 82),
    (89, 96),
    (72, 116),
    (68, 123),
    (90, 103),
    (119, 76),
    (84, 114),
    (79, 123),
    (102, 102),
    (69, 138),
    (89, 121),
    (96, 117),
    (81, 135),
    (92, 127),
    (77, 145),
    (73, 153),
    (104, 126),
    (92, 140),
    (102, 133),
    (97, 142),
    (98, 146),
    (79, 169),
    (105, 147),
    (106, 152),
    (78, 184),
    (90, 176),
    (79, 192),
    (80, 199),
    (110, 177),
    (104, 191),
    (132, 172),
    (116, 199),
    (81, 241),
    (101, 232),
    (131, 219),
    (130, 240),
    (131, 286),
)
# fmt: on


def ten_million(vocabulary: int = 32_000) -> LLaDA:
    """A LLaDA policy with hidden size 256, 8 layers and 32,000 tokens."""
    return tiny_llada(vocab=vocabulary, layers=8, width=256, heads=4)


def padded_batch(policy: LLaDA, lengths: list[tuple[int, int]]) -> SequenceBatch:
    """Rows of these prompt and answer lengths, padded on the right."""
    width = max(prompt + answer for prompt, answer in lengths)
    column = torch.arange(width)
    prompts, answers = torch.tensor(lengths).unbind(1)
    exists = column < (prompts + answers)[:, None]
    response = exists & (column >= prompts[:, None])
    ids = torch.randint(5, 500, exists.shape, generator=generator(1))
    return SequenceBatch(
        ids=ids.masked_fill(~exists, policy.pad_token_id),
        attention_mask=exists,
        response_mask=response,
        completion_mask=response,
        noise_seed=torch.arange(len(lengths)),
        sample_index=torch.arange(len(lengths)),
    )


def plain_step(policy: LLaDA, method: SFT, batch: SequenceBatch) -> Tensor:
    """Padded rows, attention written out, logits of every position: the same loss, and its gradient."""
    rows = method.corrupt(batch)
    with using_attention(policy, "eager"):
        logits = policy(rows.noisy_ids[:, 0], batch.attention_mask)
    losses = F.cross_entropy(logits.flatten(0, 1).float(), batch.ids.flatten(), reduction="none").view(batch.ids.shape)
    per_row = (losses * rows.weight[:, 0] * rows.score_mask[:, 0]).sum(1) / batch.completion_mask.sum(1)
    loss = per_row.mean()
    loss.backward()
    policy.zero_grad()
    return loss.detach()


def our_step(policy: LLaDA, method: SFT, batch: SequenceBatch, attention: str) -> Tensor:
    """The method's own step."""
    rows = method.corrupt(batch)
    counted = method.count(batch)
    with using_attention(policy, attention):
        loss, _ = method.loss_and_metrics(rows, replace(batch, denominator=counted))
        loss.backward()
    policy.zero_grad()
    return loss.detach()


def run(quick: bool) -> list[dict[str, Any]]:
    """Measure every case; `speedup` is plain seconds over ours, with the tokens each of them reads and scores."""
    policy = tiny_llada(vocab=512, layers=2, width=64, heads=4) if quick else ten_million()
    order = torch.randperm(len(GSM8K_LENGTHS), generator=generator(0)).tolist()
    lengths = [GSM8K_LENGTHS[i] for i in order[: 8 if quick else 16]]
    batch = padded_batch(policy, lengths)
    method = SFT(policy, partial(torch.optim.AdamW, lr=1e-3))
    rows = method.corrupt(batch)
    work = {
        "tokens_padded": batch.ids.numel(),
        "tokens_packed": int(batch.attention_mask.sum()),
        "positions_scored": int(rows.score_mask.sum()),
        "forwards": 1,
    }
    plain: Step = partial(plain_step, policy, method, batch)
    repeats = 3 if quick else 7
    return [
        compare(
            f"{name} instead of padded, eager, all logits",
            plain,
            partial(our_step, policy, method, batch, kernel),
            repeats,
        )
        | work
        for name, kernel in (("padded, sdpa, logits where scored", "sdpa"), ("packed, logits where scored", "varlen"))
    ]
