"""Tokens a second of the built-in sampler, against the published procedure written down plainly.

The plain version reads the whole canvas, computes logits and noise for every position and runs every row to the last
step, as the published code does. Both use the same policy, prompts and number of threads; where no row ends early and
nothing is drawn, they must also write the same tokens.

Run from the checkout: python -m benchmarks.sampler [--quick]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dare_lightning.families.llada import LLaDA
from dare_lightning.generation.builtin import BuiltinBackend
from dare_lightning.generation.canvas import left_pad
from dare_lightning.generation.engine import Stats
from tests.tiny import tiny_llada

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "early_stop": False},
    "sampled": {"temperature": 1.0, "early_stop": False},
    "greedy, answers end early": {"temperature": 0.0, "early_stop": True},
    "sampled, answers end early": {"temperature": 1.0, "early_stop": True},
}


@torch.no_grad()
def plain_generate(
    policy: LLaDA, prompts: list[list[int]], steps: int, length: int, block: int, temperature: float, stats: Stats
) -> Tensor:
    """The published procedure: int64 [B, length]."""
    ids, exists = left_pad(prompts, policy.pad_token_id)
    width = ids.shape[1]
    ids = torch.cat([ids, torch.full((len(prompts), length), policy.mask_token_id)], 1)
    attention = torch.cat([exists, torch.ones(len(prompts), length, dtype=torch.bool)], 1)
    per_block = steps // (length // block)
    for start in range(width, width + length, block):
        for step in range(per_block):
            logits = policy(ids, attention)
            stats.forwards += 1
            stats.row_forwards += ids.shape[0]
            stats.tokens += ids.numel()
            noisy = logits.double()
            if temperature > 0:
                noisy = noisy - temperature * torch.log(-torch.log(torch.rand_like(noisy)))
            noisy[..., policy.mask_token_id] = -torch.inf
            proposed = noisy.argmax(-1)
            confidence = logits.double().softmax(-1).gather(-1, proposed[..., None]).squeeze(-1)
            is_open = ids == policy.mask_token_id
            is_open[:, :width] = False
            is_open[:, start + block :] = False
            confidence[~is_open] = -torch.inf
            count = block // per_block + int(step < block % per_block)
            for row in range(len(prompts)):
                best = confidence[row].topk(count).indices
                ids[row, best] = proposed[row, best]
    return ids[:, width:]


def ending_policy(policy: LLaDA, share: float) -> LLaDA:
    """Make the end token so likely that a position draws it with about this probability at temperature 1."""
    hidden = policy.hidden_states(torch.tensor([[5, 6, 7] + [policy.mask_token_id] * 32]))[0, 3:]
    direction = hidden.mean(0)
    with torch.no_grad():
        others = policy.logits(hidden).logsumexp(-1).mean()
        wanted = others + torch.tensor(share / (1 - share)).log()
        head = policy.get_parameter("model.transformer.ff_out.weight")
        head[policy.eos_token_id] = wanted * direction / (hidden @ direction).mean()
    return policy


def run(quick: bool) -> list[dict[str, Any]]:
    """Measure every case; `speedup` is the ratio of tokens a second, built-in over plain.

    Returns:
        one dict a case: case, batch, steps, new_tokens, vocabulary, plain and builtin (each seconds, tokens_per_second,
        forwards, row_forwards, tokens_read), speedup.

    Raises:
        RuntimeError: the two samplers wrote different tokens where they must not.
    """
    count, length, block, steps = (8, 32, 8, 16) if quick else (16, 64, 16, 32)
    size = {"vocab": 512, "layers": 2, "width": 64} if quick else {"vocab": 2048, "layers": 3, "width": 128}
    prompts = [[5 + (i * 7 + j) % 30 for j in range(8 + i % 17)] for i in range(count)]
    results = []
    for name, settings in CASES.items():
        policy = tiny_llada(seed=0, heads=4, dtype=torch.float32, **size)
        policy.eval()
        if settings["early_stop"]:
            ending_policy(policy, share=0.1)
        backend = BuiltinBackend(steps=steps, max_new_tokens=length, block_length=block, **settings)
        backend.update_weights(policy, version=0)
        backend.generate(prompts[:1], [0])  # first calls pay for set-up
        plain_stats = Stats()
        arguments = (policy, prompts, steps, length, block, settings["temperature"], plain_stats)
        plain_seconds, plain = _timed(lambda arguments=arguments: plain_generate(*arguments))  # type: ignore[misc]
        seconds, batch = _timed(lambda backend=backend: backend.generate(prompts, range(count)))  # type: ignore[misc]
        if name == "greedy" and not torch.equal(plain, batch.ids[:, -length:]):
            raise RuntimeError("the plain and the built-in sampler disagree at temperature 0: the ratio means nothing")
        results.append(
            {
                "case": name,
                "batch": count,
                "steps": steps,
                "new_tokens": length,
                "vocabulary": size["vocab"],
                "plain": _row(plain_seconds, count * length, plain_stats),
                "builtin": _row(seconds, count * length, backend.stats),
                "speedup": plain_seconds / seconds,
            }
        )
    return results


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def _row(seconds: float, tokens: int, stats: Stats) -> dict[str, float]:
    return {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "forwards": stats.forwards,
        "row_forwards": stats.row_forwards,
        "tokens_read": stats.tokens,
    }


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer tokens")
    for result in run(parser.parse_args().quick):
        plain, builtin = result["plain"], result["builtin"]
        print(
            f"{result['case']:<28} {result['speedup']:5.2f}x   "
            f"{plain['tokens_per_second']:8.0f} -> {builtin['tokens_per_second']:8.0f} tokens/s   "
            f"forwards {plain['forwards']} -> {builtin['forwards']}   "
            f"tokens read {plain['tokens_read']} -> {builtin['tokens_read']}"
        )


if __name__ == "__main__":
    main()
