"""Low-rank adapters through peft, injected into the plain module: no wrapper, no generation method needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dare_lightning.families.base import TorchModule
from dare_lightning.families.checkpoint import check_keys, read_json, staged, write_tensors

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_NAME = "default"
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class AdapterReport:
    """What was adapted.

    Attributes:
        layers: full names of the adapted linear layers.
        trainable, total: parameter counts, the adapter's own included.
    """

    layers: tuple[str, ...]
    trainable: int
    total: int

    def __str__(self) -> str:
        share = 100 * self.trainable / self.total
        return (
            f"{len(self.layers)} adapted layers; {self.trainable:,} of {self.total:,} parameters train ({share:.2f} %)"
        )


class LoRA:
    """Freeze a policy and add trainable low-rank updates to its linear layers.

    Args:
        rank: inner size of each update, >= 1.
        alpha: the update is scaled by alpha / rank.
        dropout: on the update's input, in [0, 1).
        targets: names of linear layers; None takes the family's own list. A bare name means the layers of that
            name inside the numbered blocks; a layer outside them needs its full name.
        seed: of the random half of the updates; the global generator is left alone.

    Source: Hu et al. 2021, arXiv:2106.09685.
    """

    def __init__(
        self, rank: int, alpha: float, dropout: float = 0.0, targets: Sequence[str] | None = None, seed: int = 0
    ) -> None:
        if rank < 1 or not 0 <= dropout < 1:
            raise ValueError(f"rank={rank}, dropout={dropout}: rank must be 1 or more and dropout in [0, 1)")
        self.rank = rank
        self.alpha = alpha
        self.dropout = dropout
        self.targets = None if targets is None else tuple(targets)
        self.seed = seed

    def apply(self, policy: Any) -> AdapterReport:
        """Adapt the policy in place.

        Args:
            policy: any module; without `targets` it must name its own in `lora_targets`.

        Raises:
            ValueError: a target matches no linear layer, or the policy has an adapter already.
        """
        _refuse_second(policy)
        layers = match_targets(policy, policy.lora_targets if self.targets is None else self.targets)
        from peft import LoraConfig

        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=layers,
            bias="none",
        )
        return _inject(policy, config, self.seed)


def match_targets(policy: nn.Module, targets: Sequence[str]) -> list[str]:
    """Full names of the linear layers that the targets mean, in the model's order.

    Raises:
        ValueError: no target, or one that matches nothing.
    """
    linears = [name for name, module in policy.named_modules() if isinstance(module, nn.Linear)]
    matches = {target: _match(target, linears) for target in targets}
    unmatched = [target for target, names in matches.items() if not names]
    if unmatched or not matches:
        exist = sorted({name.rsplit(".", 1)[-1] for name in linears})
        raise ValueError(
            f"adapter targets {', '.join(unmatched) or '(none given)'} match no linear layer of "
            f"{type(policy).__name__}; its linear layers are called {', '.join(exist)}"
        )
    chosen = {name for names in matches.values() for name in names}
    return [name for name in linears if name in chosen]


def has_adapter(policy: TorchModule) -> bool:
    """Whether the policy carries an adapter."""
    return bool(_adapted_layers(policy))


@contextmanager
def adapters_disabled(policy: TorchModule) -> Iterator[None]:
    """Run the body with the base model: the reference policy of adapter training.

    Raises:
        ValueError: the policy has no adapter.
    """
    layers = _require_adapter(policy)
    # peft switches gradients together with the adapter; a policy that was frozen by the caller must stay so.
    trainable = [(parameter, parameter.requires_grad) for parameter in policy.parameters()]
    try:
        for layer in layers.values():
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers.values():
            layer.enable_adapters(True)
        for parameter, flag in trainable:
            parameter.requires_grad_(flag)


def merged_state_dict(policy: nn.Module, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Weights of base + adapter under the names of the plain model. The policy is not changed.

    The sum is taken in float32 at least, then rounded once to the base weight's dtype.

    Args:
        policy: with an adapter or without.
        state: its state dict, where the caller has gathered a full one; None reads the policy's.
    """
    tensors = policy.state_dict() if state is None else state
    layers = _adapted_layers(policy)
    merged = {}
    for key, value in tensors.items():
        if ".lora_" in key:
            continue
        name, found, rest = key.partition(".base_layer.")
        merged[f"{name}.{rest}" if found else key] = value
        if found and rest == "weight":
            down, up = (tensors[f"{name}.lora_{part}.{_NAME}.weight"] for part in "AB")
            merged[f"{name}.weight"] = _sum(value, down, up, layers[name].scaling[_NAME])
    return merged


@torch.no_grad()
def merge(policy: nn.Module) -> None:
    """Add the adapter to the base weights in place and remove it; every parameter is trainable afterwards.

    Raises:
        ValueError: the policy has no adapter.
    """
    layers = _require_adapter(policy)
    for name, layer in layers.items():
        base = layer.get_base_layer()
        down, up = layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight
        base.weight.copy_(_sum(base.weight, down, up, layer.scaling[_NAME]))
        policy.set_submodule(name, base)
    del policy.peft_config
    policy.requires_grad_(True)


def trained_part(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of a module's state dict what is trained: the adapters in it, without the base models."""
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    return {name: value for name, value in state.items() if name in trained}


def with_frozen_part(module: nn.Module, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `trained_part` left, together with what it left out, which the module has.

    Raises:
        ValueError: trained weights are missing.
    """
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    if missing := trained - saved.keys():
        raise ValueError(f"the checkpoint lacks {len(missing)} adapter weights, e.g. {sorted(missing)[0]}")
    return {name: value for name, value in module.state_dict().items() if name not in saved} | dict(saved)


def save_adapter(policy: Any, folder: Path) -> None:
    """Write the adapter alone, in peft's format; the base model is named by the folder the policy was read from.

    Raises:
        ValueError: the policy has no adapter.
        OSError: the folder cannot be written; what it held before is still there.
    """
    _require_adapter(policy)
    config = copy(policy.peft_config[_NAME])
    config.inference_mode = True
    config.base_model_name_or_path = None if policy.source is None else str(policy.source.resolve())
    tensors = {
        _PREFIX + key.replace(f".{_NAME}.", "."): value for key, value in policy.state_dict().items() if ".lora_" in key
    }
    with staged(folder, (CONFIG_FILE, "*.safetensors")) as scratch:
        config.save_pretrained(str(scratch))
        write_tensors(scratch / WEIGHTS_FILE, tensors)


def load_adapter(policy: nn.Module, folder: Path) -> AdapterReport:
    """Add an adapter that was saved in peft's format.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: not a plain LoRA adapter, its tensors do not fit this policy, or it has an adapter already.
    """
    from peft import LoraConfig
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    _refuse_second(policy)
    said = read_json(folder / CONFIG_FILE)
    odd = [key for key in ("use_dora", "modules_to_save", "lora_bias", "trainable_token_indices") if said.get(key)]
    if said.get("peft_type") != "LORA" or said.get("bias", "none") != "none" or odd:
        raise ValueError(
            f"{folder} is not a plain LoRA adapter ({odd or said.get('peft_type')}); merge it elsewhere first"
        )
    if not (folder / WEIGHTS_FILE).is_file():
        raise FileNotFoundError(f"{folder / WEIGHTS_FILE} is missing; {folder} is not a complete adapter folder")
    try:
        read = load_file(str(folder / WEIGHTS_FILE))
    except SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS_FILE} is damaged or cut short ({error}); fetch it again") from error
    tensors = {key.removeprefix(_PREFIX): value for key, value in read.items()}
    names = {key.split(".lora_")[0] for key in tensors}
    unknown = names - {name for name, module in policy.named_modules() if isinstance(module, nn.Linear)}
    if unknown:
        raise ValueError(
            f"the adapter in {folder} is for layers that {type(policy).__name__} lacks: {sorted(unknown)[:8]}"
        )
    config = LoraConfig.from_pretrained(str(folder))
    config.inference_mode = False
    report = _inject(policy, config, seed=0)
    own = {key.replace(f".{_NAME}.", "."): value for key, value in policy.state_dict().items() if ".lora_" in key}
    check_keys(
        {k: tuple(v.shape) for k, v in own.items()}, {k: tuple(v.shape) for k, v in tensors.items()}, str(folder)
    )
    for key, value in own.items():
        value.copy_(tensors[key])
    return report


def _inject(policy: nn.Module, config: Any, seed: int) -> AdapterReport:
    from peft import inject_adapter_in_model

    # peft draws the initial weights from the global generator.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, policy, _NAME)
    layers = _adapted_layers(policy)
    for name, parameter in policy.named_parameters():
        # Small updates are lost in the 8 bits of a bfloat16 weight.
        if ".lora_" in name and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    counts = [(parameter.numel(), parameter.requires_grad) for parameter in policy.parameters()]
    trainable = sum(size for size, trains in counts if trains)
    return AdapterReport(tuple(layers), trainable, sum(size for size, _ in counts))


def _match(target: str, linears: Sequence[str]) -> list[str]:
    if "." in target:
        return [name for name in linears if name == target or name.endswith(f".{target}")]
    named = [name for name in linears if name.rsplit(".", 1)[-1] == target]
    # LLaDA calls both a block's projection and the output head `ff_out`.
    inside = [name for name in named if any(part.isdigit() for part in name.split("."))]
    return inside or named


def _adapted_layers(policy: TorchModule) -> dict[str, Any]:
    """Adapted layers by full name. A policy that was never adapted costs no import of peft."""
    if not any(".lora_" in name for name, _ in policy.named_parameters()):
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in policy.named_modules() if isinstance(module, LoraLayer)}


def _refuse_second(policy: nn.Module) -> None:
    if has_adapter(policy):
        raise ValueError("the policy has an adapter already; merge it before adding another")


def _require_adapter(policy: TorchModule) -> dict[str, Any]:
    layers = _adapted_layers(policy)
    if not layers:
        raise ValueError("the policy has no adapter; apply one with peft=lora, or load one")
    return layers


def _sum(base: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
    wide = torch.promote_types(base.dtype, torch.float32)
    update = up.detach().to(wide) @ down.detach().to(wide)
    return (base.detach().to(wide) + scaling * update).to(base.dtype)
