"""Peak memory of scoring tokens against the size of the vocabulary: head in pieces, and all logits at once.

Each measurement is a process of its own; what its weights, their gradients and the interpreter take is subtracted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

TOKENS = 4096
WIDTH = 64


def peak(vocabulary: int, pieces: bool, tokens: int = TOKENS) -> float:
    """Megabytes that forward and backward pass of the scores of `tokens` positions add, in this process."""
    import torch

    from dare_lightning.callbacks.peak_memory import peak_memory
    from dare_lightning.families import base

    head = torch.nn.Linear(WIDTH, vocabulary, bias=False)
    hidden = torch.randn(tokens, WIDTH, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,))
    for tensor in (head.weight, hidden):
        tensor.grad = torch.zeros_like(tensor)
    if not pieces:
        base.MAX_LOGITS = sys.maxsize
    policy: Any = type("Head", (), {"logits": staticmethod(head), "head_weight": None})
    # Small first call: buffers that are made once are not counted.
    base.chosen_log_probs(policy, hidden[:2], targets[:2]).sum().backward()
    before = peak_memory(hidden.device)
    base.chosen_log_probs(policy, hidden, targets).sum().backward()
    return peak_memory(hidden.device) - before


def run(quick: bool) -> list[dict[str, Any]]:
    """Measure every vocabulary; `speedup` is the memory of all logits at once over that of the pieces."""
    results = []
    for vocabulary in (8_000, 16_000) if quick else (8_000, 32_000, 128_000):
        whole, pieces = (_measured(vocabulary, flag, 1024 if quick else TOKENS) for flag in (False, True))
        results.append(
            {
                "case": f"{vocabulary} tokens in the vocabulary",
                "unit": "MB",
                "baseline": whole,
                "measured": pieces,
                "speedup": whole / max(pieces, 1e-9),
            }
        )
    return results


def _measured(vocabulary: int, pieces: bool, tokens: int) -> float:
    command = [sys.executable, "-m", "benchmarks.memory", str(vocabulary), str(int(pieces)), str(tokens)]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    found: float = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("vocabulary", type=int)
    parser.add_argument("pieces", type=int)
    parser.add_argument("tokens", type=int)
    chosen = parser.parse_args()
    print(json.dumps(peak(chosen.vocabulary, bool(chosen.pieces), chosen.tokens)))
