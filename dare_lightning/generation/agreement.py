"""Whether training finds the log-probs again that a rollout reported."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dare_lightning.diffusion.trajectory import draw_steps, states_from_steps
from dare_lightning.families.base import PolicyModel, token_log_probs
from dare_lightning.generation.base import Capabilities
from dare_lightning.replay.batch import SequenceBatch

# Keeps the choice of steps apart from those that methods draw, whose salts are inner epochs.
_GAP = -1


@torch.no_grad()
def log_prob_gaps(policy: PolicyModel, batch: SequenceBatch, offered: Capabilities, samples: int) -> Tensor:
    """How far reported log-probs are from the policy's own, float [n], nats; nothing where that is not defined.

    Of completions that lie evenly spread in the batch, one step each, drawn from the completion's seed, is made again
    without any approximation of the sampler: the tokens it wrote are scored at temperature 1 in the state from which it
    wrote them. The state is known where tokens stay as they were written (`Capabilities.commit_steps`).

    Args:
        policy: with the weights that generated.
        batch: on any device.
        offered: by the backend that generated.
        samples: completions that are looked at, at most; each costs a forward pass.
    """
    reported, written = batch.commit_log_probs, batch.commit_step
    if samples < 1 or not (offered.commit_steps and offered.log_probs) or reported is None or written is None:
        return torch.zeros(0)
    places = torch.linspace(0, len(batch) - 1, min(samples, len(batch)), device=batch.ids.device).long()
    own = next(policy.parameters()).device
    chosen = replace(batch, states=None, proposals=None, confidence=None).select(places).to(own)
    steps, reported = written[places].to(own), reported[places].to(own)
    counted = chosen.response_mask & (steps >= 0)
    at = draw_steps(steps, counted, chosen.noise_seed, (_GAP,), most=1).at
    rows = states_from_steps(chosen.ids, chosen.response_mask, steps, counted, policy.mask_token_id, at)
    score_mask = rows.score_mask[:, 0]
    scored = token_log_probs(
        policy,
        rows.noisy_ids[:, 0],
        chosen.ids,
        chosen.attention_mask,
        score_mask,
        block_ids=chosen.block_ids(policy.block_length),
    )
    return (scored - reported.to(scored))[score_mask].abs()
