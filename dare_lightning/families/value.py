"""A value model: a second body of the policy's family, with one number for each token instead of logits."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from dare_lightning.families.base import PolicyModel, scored_states


class ValueModel(nn.Module):
    """Starts from the policy as it is and from value 0 everywhere.

    Weights of the policy that are not trained (the base model under an adapter) are shared with it; those of its output
    head are left out; all others are copied.

    Args:
        policy: copied; it has its adapter already, where it gets one.

    Attributes:
        body: the copy.
        head: hidden state -> value, without bias; its weight is 0 at first.

    Source: TraceRL, arXiv:2509.06949, and its code.
    """

    def __init__(self, policy: PolicyModel) -> None:
        super().__init__()
        states, used = _probe(policy)
        # The tokenizer holds no weights and cannot always be copied.
        kept: dict[int, Any] = {id(policy.tokenizer): policy.tokenizer}
        for p in policy.parameters():
            if not p.requires_grad:
                kept[id(p)] = p
            elif id(p) not in used:
                kept[id(p)] = nn.Parameter(p.new_empty(0), requires_grad=False)
        self.body: Any = copy.deepcopy(policy, kept)
        wide = torch.promote_types(states.dtype, torch.float32)
        self.head = nn.Linear(states.shape[-1], 1, bias=False, device="meta", dtype=wide).to_empty(device=states.device)
        nn.init.zeros_(self.head.weight)

    def forward(
        self,
        noisy_ids: Tensor,
        clean_ids: Tensor,
        attention_mask: Tensor,
        score_mask: Tensor,
        block_ids: Tensor | None = None,
    ) -> Tensor:
        """Values of the scored positions, float [B, L], float32 at least; 0 elsewhere.

        Arguments as `token_log_probs`.
        """
        states = scored_states(self.body, noisy_ids, clean_ids, attention_mask, score_mask, block_ids)
        with torch.autocast(states.device.type, enabled=False):
            values = self.head(states.to(self.head.weight.dtype)).squeeze(-1)
        return values.new_zeros(noisy_ids.shape).masked_scatter(score_mask, values)


def _probe(policy: Any) -> tuple[Tensor, set[int]]:
    """Hidden states of one token, and which parameters they depend on, by `id`: no family has to say either."""
    ids = torch.full((1, 1), policy.mask_token_id, device=next(policy.parameters()).device)
    # Dropout may draw, and the global generator is not ours.
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        states: Tensor = policy.hidden_states(ids)
    seen: set[Any] = set()
    open_ = [states.grad_fn]
    while open_:
        node = open_.pop()
        if node is not None and node not in seen:
            seen.add(node)
            open_ += [following for following, _ in node.next_functions]
    return states.detach(), {id(node.variable) for node in seen if type(node).__name__ == "AccumulateGrad"}
