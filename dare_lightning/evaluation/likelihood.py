"""How likely a policy finds given answers: the masked-diffusion bound."""

from __future__ import annotations

from torch import Tensor

from dare_lightning.diffusion.corruption import draw_counts
from dare_lightning.diffusion.likelihood import elbo, inverse_level
from dare_lightning.families.base import PolicyModel, token_log_probs
from dare_lightning.replay.batch import SequenceBatch


def negative_elbo(policy: PolicyModel, batch: SequenceBatch, rows: int) -> Tensor:
    """NELBO of each response divided by its length, float [B]; in expectation at least -log p(response | prompt) / L.

    One row at a time, so that memory does not grow with `rows`.

    Args:
        rows: noisy rows a sequence, at evenly spread numbers of hidden tokens.

    Source: LLaDA, arXiv:2502.09992, likelihood evaluation.
    """
    masks = draw_counts(batch.response_mask, batch.noise_seed, rows=rows, stratified=True)
    total = None
    for row in range(rows):
        mask = masks.mask[:, row]
        noisy = batch.ids.masked_fill(mask, policy.mask_token_id)
        scored = token_log_probs(policy, noisy, batch.ids, batch.attention_mask, mask)
        bound = elbo(scored[:, None], inverse_level(masks.level[:, row, None])[..., None])
        total = bound if total is None else total + bound
    assert total is not None  # rows >= 1
    return -total / (rows * batch.response_mask.sum(-1))
