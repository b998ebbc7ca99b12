"""The policy that the commands on a trained model work with."""

from __future__ import annotations

from typing import Any, cast

import torch
from omegaconf import DictConfig

from dare_lightning.cli.build import build_policy
from dare_lightning.cli.commands.fit import load_checkpoint, resume_path
from dare_lightning.export import load_policy_state
from dare_lightning.families.adapters import has_adapter
from dare_lightning.families.base import PolicyModel


def fill_from_checkpoint(policy: PolicyModel, cfg: DictConfig) -> None:
    """Put the weights of `ckpt_path` into the policy, where one is given.

    Raises:
        ValueError: the checkpoint is damaged or belongs to another model.
    """
    path = resume_path(cfg)
    if path is None:
        return
    state = cast(dict[str, torch.Tensor], load_checkpoint(path)["state_dict"])
    if any(".lora_" in name for name in state) and has_adapter(policy):
        # A checkpoint of an adapter leaves out the frozen weights: they are the model's own.
        parameters = cast(torch.nn.Module, policy).named_parameters()
        frozen = {f"policy.{name}": p.detach() for name, p in parameters if not p.requires_grad}
        state = frozen | state
    load_policy_state(policy, state)


def load_policy(cfg: DictConfig) -> PolicyModel:
    """The policy with the weights of `ckpt_path`, in evaluation mode, on a GPU where there is one."""
    policy = build_policy(cfg)
    fill_from_checkpoint(policy, cfg)
    module = cast(Any, policy)
    return cast(PolicyModel, module.eval().to("cuda" if torch.cuda.is_available() else "cpu"))
