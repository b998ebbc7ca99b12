"""Write a trained policy as a folder in the published layout, or its adapter alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dare_lightning.families.adapters import adapters_disabled, has_adapter, merged_state_dict, save_adapter
from dare_lightning.families.checkpoint import check_keys, parse_dtype, save_checkpoint

_PROBE_TOKENS = 32


@dataclass(frozen=True)
class ExportReport:
    """What was written.

    Attributes:
        folder: where.
        files: names of the files there.
        merge_difference: largest absolute logit difference between base + adapter and the exported weights, on 32
            random tokens; None where nothing was merged.
        logit_scale: largest absolute logit of that probe, to judge the difference by.
    """

    folder: Path
    files: tuple[str, ...]
    merge_difference: float | None = None
    logit_scale: float | None = None

    def __str__(self) -> str:
        said = f"{self.folder}: {', '.join(self.files)}"
        if self.merge_difference is None:
            return said
        return f"{said}\nmerging changed logits by at most {self.merge_difference:.3g} (of {self.logit_scale:.3g})"


def export_policy(
    policy: Any,
    folder: Path,
    adapter: Literal["merge", "keep"] = "merge",
    force: bool = False,
    dtype: str | None = None,
) -> ExportReport:
    """Write the policy for use without this project. The policy itself is not changed.

    Args:
        policy: a `PolicyModel`, with an adapter or without.
        folder: created where needed.
        adapter: "merge" writes a complete model, an adapter added to its weights; "keep" writes the adapter alone.
        force: write into a folder that is not empty; the previous checkpoint in it is replaced, other files stay.
        dtype: of the written weights; None keeps the policy's. Not for an adapter alone.

    Raises:
        FileExistsError: the folder is not empty and `force` is not set.
        ValueError: an unknown `adapter` or dtype, or "keep" without an adapter.
        OSError: the folder cannot be written; what it held before is still there.
    """
    wanted = parse_dtype(dtype)
    if adapter not in ("merge", "keep"):
        raise ValueError(f"adapter={adapter!r}; choose merge (a complete model) or keep (the adapter alone)")
    _check_target(folder, force)
    if adapter == "keep":
        if wanted is not None:
            raise ValueError(f"dtype={dtype!r} applies to a complete model; an adapter alone keeps its own")
        save_adapter(policy, folder)
        return ExportReport(folder, _names(folder))
    buffers = {name for name, _ in policy.named_buffers()}
    # The bias of a router is no weight: rounded, it would choose other experts.
    state = {n: v if n in buffers else v.to(dtype=wanted) for n, v in merged_state_dict(policy).items()}
    difference = scale = None
    if has_adapter(policy):
        difference, scale = _merge_difference(policy, state)
    save_checkpoint(folder, state, policy.config, policy.tokenizer, policy.source)
    return ExportReport(folder, _names(folder), difference, scale)


def load_policy_state(policy: Any, state_dict: Mapping[str, Tensor]) -> None:
    """Fill a policy with the weights of a training checkpoint.

    Args:
        policy: built as in training, adapter included.
        state_dict: the policy's tensors, named as in the policy or with `policy.` in front; with that prefix
            present, everything that lacks it belongs to other modules and is left out.

    Raises:
        ValueError: tensors are missing, unexpected or of a wrong shape; the policy is unchanged.
    """
    own = {name.removeprefix("policy."): value for name, value in state_dict.items() if name.startswith("policy.")}
    state = own or dict(state_dict)
    hint = ""
    if any(".lora_" in name for name in state) != has_adapter(policy):
        hint = "; one of the two has an adapter and the other has not: build the policy with the run's peft setting"
    expected = {name: tuple(value.shape) for name, value in policy.state_dict().items()}
    check_keys(expected, {name: tuple(value.shape) for name, value in state.items()}, "the training checkpoint", hint)
    policy.load_state_dict(state, strict=True)


def _check_target(folder: Path, force: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; choose a folder")
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise FileExistsError(f"{folder} is not empty; choose another folder, or overwrite its checkpoint with force")


@torch.no_grad()
def _merge_difference(policy: Any, state: Mapping[str, Tensor]) -> tuple[float, float]:
    """Largest difference and size of the logits on one random sequence, adapter applied against adapter merged."""
    merged = {name: state[name.replace(".base_layer.", ".")] for name in policy.state_dict() if ".lora_" not in name}
    rows = int(policy.config["vocab_size"])
    ids = torch.randint(rows, (1, _PROBE_TOKENS), generator=torch.Generator().manual_seed(0))
    ids = ids.to(next(iter(state.values())).device)
    training = policy.training
    policy.eval()
    try:
        before = policy(ids).double()
        # The policy itself on the merged weights: what it was built with stays as it is.
        with adapters_disabled(policy):
            after = torch.func.functional_call(policy, merged, (ids,)).double()
    finally:
        policy.train(training)
    return float((before - after).abs().max()), float(before.abs().max())


def _names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in folder.iterdir()))
