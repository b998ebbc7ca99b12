"""How the losses of tokens that single denoising steps wrote are averaged.

Each average is a weight for every token, the part of the loss it belongs to, and what each part is divided by. Parts
are summed over micro-batches and ranks before they are divided, so a split of the batch changes nothing.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

StepAggregation = Literal[
    "token_mean", "dr_grpo", "taught_dr_grpo", "step_mean", "transition_mean", "row_mean", "row_dr_grpo", "group_mean"
]
STEP_AGGREGATIONS: tuple[str, ...] = (
    "token_mean",
    "dr_grpo",
    "taught_dr_grpo",
    "step_mean",
    "transition_mean",
    "row_mean",
    "row_dr_grpo",
    "group_mean",
)

MAX_PARTS = 4096
"""Parts of a loss that is an average of averages: the steps of a rollout, or its groups."""


class Shares(NamedTuple):
    """What each token's loss is multiplied by, and where it goes.

    Attributes:
        weight: float64 [B, L], 0 where nothing counts.
        part: int64 [B, L], below D.
        denominator: float64 [D], what this micro-batch adds to the number each part is divided by; the loss is the mean
            over the parts whose number is above 0.
    """

    weight: Tensor
    part: Tensor
    denominator: Tensor

    def total(self, loss: Tensor, denominator: Tensor) -> Tensor:
        """The summed loss of each part, float [D], to be divided by `denominator` and added up.

        Args:
            loss: float [B, L], finite everywhere.
            denominator: float [D], that of the whole optimiser step.
        """
        weighed = (loss * self.weight.to(loss)).flatten()
        summed = loss.new_zeros(len(self.denominator)).index_add(0, self.part.flatten(), weighed)
        return summed / (denominator > 0).sum().clamp(min=1)


def check_step_aggregation(mode: str) -> None:
    """Raise ValueError where there is no such average."""
    if mode not in STEP_AGGREGATIONS:
        raise ValueError(f"aggregation={mode!r} does not exist; choose one of {', '.join(STEP_AGGREGATIONS)}")


def step_shares(
    mode: StepAggregation,
    mask: Tensor,
    step: Tensor,
    *,
    response_mask: Tensor,
    block: Tensor | None = None,
    group: Tensor | None = None,
    taught: Tensor | None = None,
) -> Shares:
    """The shares of the tokens in `mask`.

    Args:
        mode: "token_mean" the mean over tokens; "dr_grpo" their sum over the room B R of the responses;
            "taught_dr_grpo" the same over the room of those that teach; "step_mean" the mean over the tokens of each
            step, then over steps; "transition_mean" over the tokens that one step wrote (in one block), then over those
            transitions of a sample, then over samples; "row_mean" over the tokens of each row, then over rows;
            "row_dr_grpo" the sum of each row over the response's room, then the mean over rows; "group_mean" the mean
            over the tokens of each group, then over groups.
        mask: bool [B, L].
        step: int64 [B, L], the row each token is scored in.
        response_mask: bool [B, L], the room.
        block: int64 [B, L]; needed by "transition_mean" where blocks count their own steps.
        group: int64 [B]; needed by "group_mean".
        taught: bool [B]; needed by "taught_dr_grpo".

    Raises:
        ValueError: no such average, a column is missing, or there are more than `MAX_PARTS` parts.
    """
    check_step_aggregation(mode)
    room = response_mask.sum(-1).double()
    if mode in ("token_mean", "dr_grpo", "taught_dr_grpo"):
        return _over_tokens(mode, mask, room, taught)
    if mode in ("step_mean", "group_mean"):
        return _over_parts(mode, mask, step if mode == "step_mean" else _by_group(group, mask))
    one, whole = mask.double(), torch.zeros_like(step)
    same = _companions(mask, step, block if mode == "transition_mean" else None)
    weight = one / same.clamp(min=1)
    rows = weight.sum(-1)
    if mode == "row_mean":
        return Shares(weight, whole, rows.sum().view(1))
    if mode == "row_dr_grpo":
        return Shares(one, whole, (rows * room).sum().view(1))
    return Shares(weight / rows.clamp(min=1)[:, None], whole, one.new_full((1,), len(mask)))


def _over_tokens(mode: str, mask: Tensor, room: Tensor, taught: Tensor | None) -> Shares:
    one = mask.double()
    if mode == "taught_dr_grpo":
        assert taught is not None
        room = room * taught
    divisor = one.sum() if mode == "token_mean" else room.sum()
    return Shares(one, torch.zeros_like(mask, dtype=torch.int64), divisor.view(1))


def _over_parts(mode: str, mask: Tensor, part: Tensor) -> Shares:
    one = mask.double()
    part = _checked(torch.where(mask, part, 0), mode)
    return Shares(one, part, one.new_zeros(MAX_PARTS).index_add(0, part.flatten(), one.flatten()))


def _companions(mask: Tensor, step: Tensor, block: Tensor | None) -> Tensor:
    """How many counted tokens of the sample share a token's step (and block), float64 [B, L]; 0 where none counts."""
    sample = torch.arange(len(step), device=step.device)[:, None].expand_as(step)
    blocks = torch.zeros_like(step) if block is None else block
    keys = torch.stack([sample[mask], blocks[mask], step[mask]], 1)
    _, place, sizes = torch.unique(keys, dim=0, return_inverse=True, return_counts=True)
    return torch.zeros_like(step, dtype=torch.float64).masked_scatter(mask, sizes[place].double())


def _by_group(group: Tensor | None, mask: Tensor) -> Tensor:
    if group is None:
        raise ValueError("aggregation=group_mean needs the number of each sample's group (group_index)")
    return group[:, None].expand_as(mask)


def _checked(part: Tensor, mode: str) -> Tensor:
    if part.numel() and int(part.max()) >= MAX_PARTS:
        what, other = ("steps", "transition_mean") if mode == "step_mean" else ("groups", "token_mean")
        raise ValueError(
            f"aggregation={mode} averages over at most {MAX_PARTS} {what}, found number {int(part.max())};"
            f" use aggregation={other}"
        )
    return part
