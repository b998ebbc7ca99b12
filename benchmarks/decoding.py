"""Faster decoders on the embedded task: time, passes and columns read, beside the held-out solve rate.

The baseline is the published procedure written plainly (see `sampler`), one token a step, on the policy and the
held-out puzzles that ship with the package.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.sampler import plain_generate
from dare_lightning.datamodules.chat import encode_prompt
from dare_lightning.evaluation.benchmarks.sudoku import SudokuTask
from dare_lightning.families.load import load_policy
from dare_lightning.generation.builtin import BuiltinBackend
from dare_lightning.generation.engine import Stats
from dare_lightning.generation.threshold import ConfidenceFactor, ConfidenceThreshold
from dare_lightning.rewards.sudoku import SudokuReward
from tests.shared import ROOT

ANSWER = 17
"""16 digits and the end token."""

CASES: dict[str, dict[str, Any]] = {
    "built in, one token a step": {"steps": ANSWER},
    "confidence threshold 0.9": {"schedule": ConfidenceThreshold(0.9)},
    "confidence factor 1": {"schedule": ConfidenceFactor(1.0)},
    "dual cache, confidence factor 1": {"schedule": ConfidenceFactor(1.0), "cache": "dual"},
    "dual cache filled anew every 2 passes, factor 1": {
        "schedule": ConfidenceFactor(1.0),
        "cache": "dual",
        "cache_refresh": 2,
    },
}


def run(quick: bool) -> list[dict[str, Any]]:
    """Measure every case; `speedup` is the plain procedure's seconds over the case's.

    Returns:
        one dict a case: case, unit, baseline, measured, speedup, forwards, tokens_read, solve_rate.
    """
    policy: Any = load_policy(str(ROOT / "dare_lightning" / "assets" / "tiny_sudoku"))
    policy.eval()
    examples = SudokuTask(form="compact", empty=8).examples("heldout", 32 if quick else 512, seed=42)
    prompts = [encode_prompt(policy.tokenizer, example.messages) for example in examples]
    reward = SudokuReward(form="compact")

    def solved(responses: torch.Tensor) -> float:
        texts = [policy.tokenizer.decode(row[:16].tolist(), skip_special_tokens=True) for row in responses]
        return sum(verdict.status == "right" for verdict in reward(texts, examples)) / len(examples)

    stats = Stats()
    started = time.perf_counter()
    plain = plain_generate(policy, prompts, ANSWER, ANSWER, ANSWER, 0.0, stats)
    baseline = time.perf_counter() - started
    results = [_result("plain, one token a step", baseline, baseline, stats, solved(plain))]
    for name, settings in CASES.items():
        backend = BuiltinBackend(max_new_tokens=ANSWER, early_stop=False, max_batch_tokens=2**20, **settings)
        backend.update_weights(policy, version=0)
        backend.generate(prompts[:2], [0, 1])  # first calls pay for set-up
        started = time.perf_counter()
        batch = backend.generate(prompts, range(len(prompts)))
        seconds = time.perf_counter() - started
        results.append(_result(name, baseline, seconds, backend.stats, solved(batch.ids[:, -ANSWER:])))
    return results


def _result(case: str, baseline: float, seconds: float, stats: Stats, solve_rate: float) -> dict[str, Any]:
    cost = f"{stats.forwards} forwards, {stats.tokens} columns read, solve rate {solve_rate:.3f}"
    return {
        "case": f"{case} ({cost})",
        "unit": "s",
        "baseline": baseline,
        "measured": seconds,
        "speedup": baseline / seconds,
        "forwards": stats.forwards,
        "tokens_read": stats.tokens,
        "solve_rate": solve_rate,
    }
