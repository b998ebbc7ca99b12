"""A small policy inside the shape of a larger one: the same answers at the larger one's price.

What a policy solves and what a forward pass of it costs are then chosen separately, so that a decoder can be timed on
a policy of realistic shape that is as able at the embedded task as the one that ships, without training it for days.
"""

from __future__ import annotations

from typing import Any

import torch

from dare_lightning.families.llada import LLaDA

UNLIKELY = 1e4
"""How strongly the final norm lifts the constant that makes added tokens impossible."""


@torch.no_grad()
def widened(policy: LLaDA, layers: int, width: int, vocabulary: int) -> LLaDA:
    """A LLaDA policy of this size that computes what `policy` computes, up to rounding; added tokens are impossible.

    Added dimensions stay 0 in the residual stream, added heads and MLP units write nothing, added layers pass their
    input on. Root mean squares over more dimensions are smaller by a known factor, which the norms' weights take
    back. One added dimension holds a constant that the final norm lifts and the head turns into logits far below all
    others for added tokens; its square takes the place of the norms' epsilon.

    Args:
        policy: with an output head of its own, as the shipped one.
        layers, width, vocabulary: at least the policy's, the width by a whole factor and more than it.
    """
    small = policy.config
    factor = width // small["d_model"]
    if factor * small["d_model"] != width or factor < 2:
        raise ValueError(f"width={width} must be a multiple of the policy's {small['d_model']}, and more")
    # With eps e, ms / factor + e / factor is the old mean square plus e over factor: half of e is the constant's share.
    constant = (small["d_model"] * small["rms_norm_eps"] / 2) ** 0.5
    config: dict[str, Any] = small | {
        "d_model": width,
        "n_layers": layers,
        "n_heads": small["n_heads"] * factor,
        "n_kv_heads": small["n_kv_heads"] * factor,
        "mlp_hidden_size": small["mlp_hidden_size"] * factor,
        "rms_norm_eps": small["rms_norm_eps"] / (2 * factor),
        "vocab_size": vocabulary,
        "embedding_size": vocabulary,
    }
    wide = LLaDA.from_config(config, policy.tokenizer, 0)
    known = dict(policy.named_parameters())
    for name, target in wide.named_parameters():
        target.zero_()
        if (source := known.get(name)) is None:
            continue
        scale = factor**-0.5 if source.dim() == 1 else 1.0
        target[tuple(slice(size) for size in source.shape)] = source * scale
    wide.get_parameter("model.transformer.wte.weight")[:, small["d_model"]] = constant
    wide.get_parameter("model.transformer.ln_f.weight")[small["d_model"]] = UNLIKELY
    wide.get_parameter("model.transformer.ff_out.weight")[small["embedding_size"] :, small["d_model"]] = -1.0
    return wide.eval()
