"""The protocol between the rollout callback and whatever generates text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dare_lightning.families.base import PolicyModel
from dare_lightning.replay.batch import SequenceBatch

Progress = Callable[[int, int], None]
"""Called with (denoising steps done, denoising steps in all)."""


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do; compared with what the method needs before anything is generated.

    Attributes:
        stochastic: honours the temperature, so that a group's completions differ.
        commit_steps: returns the forward pass that wrote each token, from which every earlier state follows.
        log_probs: returns each token's log-prob when it was written.
        states: can record what every forward pass read and proposed, and how sure it was.
        left_to_right: writes one token a pass, from the left.
        tree: grows a prompt's completions as a tree, and says which node each belongs to.
        group_size: completions that a prompt must have; None for any number.
    """

    stochastic: bool
    commit_steps: bool
    log_probs: bool
    states: bool = False
    left_to_right: bool = False
    tree: bool = False
    group_size: int | None = None


WAYS: dict[str, str] = {
    "commit_steps": "tokens must stay as they were written: no running_confidence, lengths or editing, and an"
    " eos_policy other than truncate",
    "log_probs": "choose a backend that reports them",
    "states": "every pass must read a canvas of one length whole: set rollout.backend.cache and rollout.backend.lengths"
    " to null, and eos_policy to another than truncate",
    "left_to_right": "choose rollout=left_to_right, or rollout=block_left_to_right for a block-diffusion policy",
    "tree": "choose rollout=tree",
}
"""What gives each capability that a method may need, for errors."""


class GenerationBackend(Protocol):
    """Generates completions for tokenised prompts. A row's result depends on its prompt and seed alone."""

    @property
    def capabilities(self) -> Capabilities:
        """What this backend can do."""
        ...

    @property
    def temperature(self) -> float:
        """The sampling temperature; 0 is greedy."""
        ...

    def validate(self, policy: PolicyModel) -> None:
        """Raise ValueError where this policy or these settings cannot be served. Called before training starts."""
        ...

    def update_weights(self, policy: PolicyModel, version: int) -> None:
        """Take the policy's current weights; `version` is the trainer's global step."""
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        progress: Progress | None = None,
        record_states: bool = False,
    ) -> SequenceBatch:
        """One completion for each prompt, in order, on the CPU or the policy's device.

        Args:
            prompts: B token-id lists, at least one token each.
            seeds: B integers; row i draws from seeds[i] alone. They become `noise_seed`.
            progress: told about denoising steps.
            record_states: fill `states`, `proposals` and `confidence`; only where the capabilities say so.
        """
        ...
