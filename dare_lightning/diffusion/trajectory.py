"""What a rollout's own denoising steps say: which tokens a step wrote, and what its forward pass read.

Where no token is ever hidden again, the input of every forward pass follows from the final tokens and the step that
wrote each (`commit_step`), so no state need be stored. Block policies write several blocks by steps of their own; one
pass over [noisy ; clean] scores the same local step of all blocks at once, because a noisy block sees its own tokens
and the clean blocks before it.

A response token that no step wrote (an early stop filled it in) was hidden in every pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dare_lightning.diffusion.noise import generator
from dare_lightning.diffusion.rows import Rows


class Subset(NamedTuple):
    """Some of each sample's steps.

    Attributes:
        at: int64 [B, N], the chosen steps in ascending order; `UNUSED` where a sample has fewer.
        chosen: bool [B, L], the tokens that one of them wrote.
        scale: float64 [B], steps of the sample over steps chosen: the weight that keeps sums over steps unbiased.
    """

    at: Tensor
    chosen: Tensor
    scale: Tensor


# Keeps the stream apart from others of a sample; corruption.py and blocks.py have theirs.
_STEPS = 21

UNUSED = torch.iinfo(torch.int64).max
"""A step that no sample has: nothing is hidden but what was never written, and nothing is scored."""


def dense_steps(commit_step: Tensor, block: Tensor | None = None) -> Tensor:
    """Number each sample's steps 0, 1, 2, ... in their order, leaving out those that wrote nothing: int64 [B, L].

    Args:
        commit_step: int64 [B, L], -1 where no step wrote the token.
        block: int64 [B, L]; each block then counts its own steps.

    Returns:
        int64 [B, L], -1 where no step wrote the token.
    """
    written = commit_step >= 0
    sample = torch.arange(len(commit_step), device=commit_step.device)[:, None].expand_as(commit_step)
    blocks = torch.zeros_like(commit_step) if block is None else block
    keys = torch.stack([sample[written], blocks[written], commit_step[written]], 1)
    if len(keys) == 0:
        return torch.full_like(commit_step, -1)
    # Sorted by sample, block and step, so that a step's number is its distance from the first of its block.
    steps, place = torch.unique(keys, dim=0, return_inverse=True)
    _, owner, sizes = torch.unique_consecutive(steps[:, :2], dim=0, return_inverse=True, return_counts=True)
    first = sizes.cumsum(0) - sizes
    number = torch.arange(len(steps), device=steps.device) - first[owner]
    return torch.full_like(commit_step, -1).masked_scatter(written, number[place])


def left_to_right_steps(response_mask: Tensor, block: Tensor | None = None) -> Tensor:
    """The steps of a sampler that writes one token a pass, from the left: int64 [B, L], -1 outside the response.

    Args:
        response_mask: bool [B, L].
        block: int64 [B, L]; each block then counts its own steps.
    """
    order = (response_mask.cumsum(-1) - 1).masked_fill(~response_mask, -1)
    return dense_steps(order, block)


def collapse_steps(step: Tensor, size: int) -> Tensor:
    """Merge every `size` consecutive steps of `dense_steps` into one; what it scores was all hidden before it.

    Raises:
        ValueError: the size is below 1.

    Source: shrinking of TraceRL, arXiv:2509.06949.
    """
    if size < 1:
        raise ValueError(f"shrink={size} must be at least 1, which merges nothing")
    return torch.where(step >= 0, step // size, step)


def states_from_steps(
    ids: Tensor, response_mask: Tensor, step: Tensor, counted: Tensor, mask_token_id: int, at: Tensor | None = None
) -> Rows:
    """The rows in which each counted token is scored once, in the state from which it was written.

    Row n hides the response tokens that step `at[n]` or a later one wrote, and those that none wrote.

    Args:
        ids: int64 [B, L], clean tokens.
        response_mask: bool [B, L].
        step: int64 [B, L], the (dense, local, collapsed) step of each token; -1 where there is none.
        counted: bool [B, L], what is scored.
        at: int64 [B, N], the step of each row; None for 0, 1, ... as far as a counted token needs.

    Returns:
        Rows of weight 1. N is at least 1; rows beyond a sample's last step score nothing, and so cost nothing.
    """
    scored = counted & (step >= 0)
    if at is None:
        rows = int(step.masked_fill(~scored, 0).max()) + 1 if step.numel() else 1
        at = torch.arange(rows, device=ids.device).expand(len(ids), -1)
    hidden = response_mask[:, None] & ((step < 0)[:, None] | (step[:, None] >= at[..., None]))
    score_mask = scored[:, None] & (step[:, None] == at[..., None])
    weight = torch.ones(1, 1, 1, device=ids.device).expand(score_mask.shape)
    return Rows(ids[:, None].masked_fill(hidden, mask_token_id), score_mask, weight)


def draw_steps(step: Tensor, counted: Tensor, noise_seed: Tensor, salt: tuple[int, ...], most: int) -> Subset:
    """At most `most` of each sample's steps, chosen at random among those that wrote a counted token.

    A sample's draw depends on its own seed and steps alone.

    Args:
        step: int64 [B, L], as in `states_from_steps`.
        counted: bool [B, L].
        noise_seed: int64 [B].
        salt: what else the stream depends on, for instance the inner epoch.

    Raises:
        ValueError: `most` is below 1.
    """
    if most < 1:
        raise ValueError(f"max_train_steps={most} must be at least 1, or null for all steps")
    drawn, scale = [], []
    for seed, steps, keep in zip(noise_seed.tolist(), step.cpu(), (counted & (step >= 0)).cpu(), strict=True):
        known = steps[keep].unique()
        order = torch.randperm(len(known), generator=generator(seed, _STEPS, *salt))[:most]
        drawn.append(known[order.sort().values])
        scale.append(len(known) / max(len(order), 1))
    at = torch.full((len(drawn), max(1, *map(len, drawn))), UNUSED)
    for row, chosen in enumerate(drawn):
        at[row, : len(chosen)] = chosen
    at = at.to(step.device)
    wrote = counted & (step[..., None] == at[:, None]).any(-1)
    return Subset(at, wrote, torch.tensor(scale, dtype=torch.float64, device=step.device))
