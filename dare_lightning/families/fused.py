"""Log-probs of targets through a kernel that holds logits in a GPU's registers alone."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
PACKAGE = "cut_cross_entropy"


def half_precision(hidden: Tensor) -> torch.dtype | None:
    """The half precision in which a head would multiply these states on this GPU now; None where there is none."""
    if not hidden.is_cuda:
        return None
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else hidden.dtype
    return dtype if dtype in HALF else None


def fused_log_probs(weight: Tensor | None, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor | None:
    """log softmax(hidden weight^T / temperature) of the targets, float32 [N]; None where no kernel serves them.

    It serves half precision on a GPU, where the package is installed (`pip install ".[fused]"`). The logits are summed
    in float32 and never written to memory; gradients are those of the softmax, none left out for being small.

    Args:
        weight: float [V, H] of a head that is a product with it; None where it is another.
        hidden: float [N, H].
        targets: int64 [N].
        temperature: above 0.

    Source: Wijmans et al. 2024, arXiv:2411.09009, Cut Cross-Entropy.
    """
    dtype = half_precision(hidden)
    if weight is None or dtype is None or len(hidden) == 0 or importlib.util.find_spec(PACKAGE) is None:
        return None
    from cut_cross_entropy import linear_cross_entropy

    states = (hidden / temperature).to(dtype).contiguous()
    losses: Tensor = linear_cross_entropy(states, weight, targets, reduction="none", filter_eps=None)
    return -losses.float()
