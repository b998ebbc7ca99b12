"""Faster decoders: time, passes and columns read, beside the held-out solve rate of the embedded task.

The baseline is the published procedure written plainly (see `sampler`), one token a step. Three policies: the one that
ships with the package; the same in the shape of a policy of hidden size 256, 8 layers and 32,000 tokens (see
`widened`), which gives the same answers at a realistic price; and a random one of that shape at GSM8K's lengths, where
a fixed number of steps is taken and nothing is solved.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.packing import GSM8K_LENGTHS, ten_million
from benchmarks.sampler import plain_generate
from benchmarks.widened import widened
from dare_lightning.datamodules.chat import encode_prompt
from dare_lightning.evaluation.benchmarks.sudoku import SudokuTask
from dare_lightning.families.load import load_policy
from dare_lightning.generation.builtin import BuiltinBackend
from dare_lightning.generation.engine import Stats
from dare_lightning.generation.threshold import ConfidenceFactor, ConfidenceThreshold
from dare_lightning.rewards.base import Example
from dare_lightning.rewards.sudoku import SudokuReward
from tests.shared import ROOT

ANSWER = 17
"""16 digits and the end token."""

LOGITS = 2**26
"""The most logits that the plain procedure may hold, 0.5 GB in float64; where they were more, it reads fewer rows."""

CASES: dict[str, dict[str, Any]] = {
    "built in, one token a step": {"steps": ANSWER},
    "confidence threshold 0.9": {"schedule": ConfidenceThreshold(0.9)},
    "confidence factor 0.5": {"schedule": ConfidenceFactor(0.5)},
    "confidence factor 1": {"schedule": ConfidenceFactor(1.0)},
    "dual cache, factor 1": {"schedule": ConfidenceFactor(1.0), "cache": "dual"},
    "dual cache filled anew every 2 passes, factor 1": {
        "schedule": ConfidenceFactor(1.0),
        "cache": "dual",
        "cache_refresh": 2,
    },
    "dual cache, sure 0.65, factor 1": {"schedule": ConfidenceFactor(1.0), "cache": "dual", "cache_sure": 0.65},
    "dual cache, sure 0.7, factor 0.5": {"schedule": ConfidenceFactor(0.5), "cache": "dual", "cache_sure": 0.7},
    "prefix cache, sure 0.7, factor 0.5": {"schedule": ConfidenceFactor(0.5), "cache": "prefix", "cache_sure": 0.7},
    "dual cache, sure 0.9, threshold 0.9": {
        "schedule": ConfidenceThreshold(0.9),
        "cache": "dual",
        "cache_sure": 0.9,
    },
}


def run(quick: bool) -> list[dict[str, Any]]:
    """Measure every case; `speedup` is the plain procedure's seconds over the case's.

    Returns:
        one dict a case: case, unit, baseline, measured, speedup, forwards, tokens_read, and where there is a task
        solve_rate.
    """
    shipped: Any = load_policy(str(ROOT / "dare_lightning" / "assets" / "tiny_sudoku"))
    shipped.eval()
    wide = widened(shipped, *((4, 128, 512) if quick else (8, 256, 32_000)))
    results = on_task("embedded task", shipped, 16 if quick else 2048)
    results += on_task("embedded task, 32,000 tokens and 256 x 8", wide, 8 if quick else 64)
    return results + at_fixed_steps(quick)


def on_task(name: str, policy: Any, answers: int) -> list[dict[str, Any]]:
    """Every case on held-out puzzles."""
    examples = SudokuTask(form="compact", empty=8).examples("heldout", answers, seed=42)
    prompts = [encode_prompt(policy.tokenizer, example.messages) for example in examples]
    stats = Stats()
    plain, baseline = _plain(policy, prompts, ANSWER, ANSWER, stats)
    first = _result(f"{name}: plain, one token a step", baseline, baseline, stats, _solved(policy, plain, examples))
    results = [first]
    for case, settings in CASES.items():
        responses, seconds, stats = _ours(policy, prompts, ANSWER, settings)
        results.append(_result(f"{name}: {case}", baseline, seconds, stats, _solved(policy, responses, examples)))
    return results


def at_fixed_steps(quick: bool) -> list[dict[str, Any]]:
    """One token a step in blocks, with and without caches, on prompts of GSM8K's lengths."""
    policy = ten_million(512 if quick else 32_000).eval()
    new_tokens, block = (16, 8) if quick else (32, 16)
    prompts = [[5 + (i * 7 + j) % 30 for j in range(length)] for i, (length, _) in enumerate(GSM8K_LENGTHS[::16])]
    stats = Stats()
    _, baseline = _plain(policy, prompts, new_tokens, block, stats)
    results = [_result("GSM8K lengths: plain, one token a step", baseline, baseline, stats, None)]
    for cache in (None, "prefix", "dual"):
        settings = {"steps": new_tokens, "block_length": block, "cache": cache}
        _, seconds, stats = _ours(policy, prompts, new_tokens, settings)
        results.append(_result(f"GSM8K lengths: cache {cache}", baseline, seconds, stats, None))
    return results


def _plain(
    policy: Any, prompts: Sequence[list[int]], new_tokens: int, block: int, stats: Stats
) -> tuple[Tensor, float]:
    columns = max(len(prompt) for prompt in prompts) + new_tokens
    batch = max(1, LOGITS // (columns * policy.config["vocab_size"]))
    started = time.perf_counter()
    rows = [
        plain_generate(policy, list(prompts[first : first + batch]), new_tokens, new_tokens, block, 0.0, stats)
        for first in range(0, len(prompts), batch)
    ]
    return torch.cat(rows), time.perf_counter() - started


def _ours(
    policy: Any, prompts: Sequence[list[int]], new_tokens: int, settings: dict[str, Any]
) -> tuple[Tensor, float, Stats]:
    backend = BuiltinBackend(max_new_tokens=new_tokens, early_stop=False, max_batch_tokens=2**20, **settings)
    backend.update_weights(policy, version=0)
    backend.generate(prompts[:2], [0, 1])  # first calls pay for set-up
    started = time.perf_counter()
    batch = backend.generate(prompts, range(len(prompts)))
    return batch.ids[:, -new_tokens:], time.perf_counter() - started, backend.stats


def _solved(policy: Any, responses: Tensor, examples: Sequence[Example]) -> float:
    texts = [policy.tokenizer.decode(row[:16].tolist(), skip_special_tokens=True) for row in responses]
    return sum(verdict.status == "right" for verdict in SudokuReward(form="compact")(texts, examples)) / len(examples)


def _result(case: str, baseline: float, seconds: float, stats: Stats, solve_rate: float | None) -> dict[str, Any]:
    cost = f"{stats.forwards} forwards, {stats.tokens} columns read"
    solved = {} if solve_rate is None else {"solve_rate": solve_rate}
    return {
        "case": f"{case} ({cost}{''.join(f', solve rate {rate:.3f}' for rate in solved.values())})",
        "unit": "s",
        "baseline": baseline,
        "measured": seconds,
        "speedup": baseline / seconds,
        "forwards": stats.forwards,
        "tokens_read": stats.tokens,
    } | solved
