"""From denoised canvases to the batch that training reads: where an answer ends, and what counts after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from dare_lightning.families.base import PolicyModel
from dare_lightning.generation.canvas import Canvas, first_true, left_pad
from dare_lightning.generation.history import History, Trajectory
from dare_lightning.replay.batch import SequenceBatch

EosPolicy = Literal["mask_loss", "truncate", "keep"]
EOS_POLICIES: tuple[str, ...] = get_args(EosPolicy)


@dataclass(frozen=True)
class Responses:
    """What denoising left, on the CPU.

    Attributes:
        tokens, commit_step: int64 [B, G].
        commit_log_probs: float32 [B, G].
        forward_passes: int64 [B].
        length: int64 [B], columns that exist; None where all do.
        trajectory: what every pass read and proposed; None where it was not recorded.
        node_index: int64 [B, D], see `SequenceBatch`; None where completions did not grow as trees.
    """

    tokens: Tensor
    commit_step: Tensor
    commit_log_probs: Tensor
    forward_passes: Tensor
    length: Tensor | None = None
    trajectory: Trajectory | None = None
    node_index: Tensor | None = None

    @classmethod
    def of(cls, canvas: Canvas, history: History | None = None) -> Responses:
        """The response part of a finished canvas."""
        return cls(
            tokens=canvas.response.cpu(),
            commit_step=canvas.commit_step.cpu(),
            commit_log_probs=canvas.commit_log_probs.cpu(),
            forward_passes=canvas.forward_passes.cpu(),
            length=canvas.length.cpu(),
            trajectory=None if history is None else history.trajectory(*canvas.masked.shape),
        )

    @classmethod
    def in_order(cls, parts: Sequence[Responses], order: Sequence[int]) -> Responses:
        """One set of responses of all parts; row i of the parts put together becomes row order[i]."""
        inverse = torch.tensor(order).argsort()
        names = ("tokens", "commit_step", "commit_log_probs", "forward_passes", "length")
        columns: dict[str, Tensor | None] = {}
        for name in names:
            values = [getattr(part, name) for part in parts]
            columns[name] = None if values[0] is None else torch.cat(values)[inverse]
        trajectories = [part.trajectory for part in parts if part.trajectory is not None]
        joined = Trajectory.joined(trajectories, inverse) if trajectories else None
        return cls(**columns, trajectory=joined)  # type: ignore[arg-type]


def answer_mask(tokens: Tensor, stop_token_ids: Sequence[int]) -> Tensor:
    """bool [B, G]: up to and including the first stop token; everything where there is none."""
    ends = torch.isin(tokens, torch.tensor(list(stop_token_ids), dtype=tokens.dtype, device=tokens.device))
    return torch.arange(tokens.shape[1], device=tokens.device) <= first_true(ends)[:, None]


def to_batch(
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    responses: Responses,
    policy: PolicyModel,
    eos_policy: EosPolicy,
) -> SequenceBatch:
    """Prompts, left-padded to the longest, and their responses.

    What follows the first end token depends on `eos_policy`:
        mask_loss: it exists and may be masked by corruption, but does not count in the loss.
        truncate: it does not exist; padding takes its place.
        keep: it counts like the rest.

    Returns:
        a batch on the CPU, with every pass where it was recorded; every response starts in column P, the width of the
        longest prompt.

    Source: the conventions of d1 (loss ends at the first end token) and of LLaDA's rollouts (attention does not).
    """
    prompt_ids, exists = left_pad(prompts, policy.pad_token_id)
    answer = answer_mask(responses.tokens, policy.stop_token_ids)
    there = torch.ones_like(answer)
    if responses.length is not None:
        there = torch.arange(answer.shape[1]) < responses.length[:, None]
        answer = answer & there
    written = answer if eos_policy == "truncate" else there
    counted = there if eos_policy == "keep" else answer
    nothing = torch.zeros_like(exists)

    def beside_prompt(response: Tensor, filler: int | float) -> Tensor:
        return torch.cat([torch.full(exists.shape, filler, dtype=response.dtype), response], 1)

    return SequenceBatch(
        ids=torch.cat([prompt_ids, responses.tokens.masked_fill(~written, policy.pad_token_id)], 1),
        attention_mask=torch.cat([exists, written], 1),
        response_mask=torch.cat([nothing, written], 1),
        completion_mask=torch.cat([nothing, counted], 1),
        noise_seed=torch.tensor(list(seeds), dtype=torch.int64),
        sample_index=torch.arange(len(prompts)),
        commit_step=beside_prompt(responses.commit_step.masked_fill(~written, -1), -1),
        commit_log_probs=beside_prompt(responses.commit_log_probs.masked_fill(~written, 0.0), 0.0),
        forward_passes=responses.forward_passes,
        node_index=responses.node_index,
        **_step_columns(responses, prompt_ids, written, policy.pad_token_id),
    )


def _step_columns(responses: Responses, prompt_ids: Tensor, written: Tensor, pad_token_id: int) -> dict[str, Any]:
    """states, proposals and confidence of the batch, [B, T, P + G], where they were recorded."""
    if responses.trajectory is None:
        return {}
    recorded = responses.trajectory
    passes = recorded.states.shape[1]
    made = (torch.arange(passes) < responses.forward_passes[:, None])[..., None]
    prompt = prompt_ids[:, None].expand(-1, passes, -1)
    absent = ~written[:, None]

    def whole(response: Tensor) -> Tensor:
        return torch.cat([prompt, response.masked_fill(absent, pad_token_id)], 2).masked_fill(~made, 0)

    confidence = recorded.confidence.masked_fill(absent, 0.0)
    return {
        "states": whole(recorded.states),
        "proposals": whole(recorded.proposals),
        "confidence": torch.cat([confidence.new_zeros(prompt.shape), confidence], 2),
    }
