"""Find the family that reads a checkpoint, by asking every module of this package."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn

import dare_lightning.families as package
from dare_lightning.families.adapters import CONFIG_FILE, load_adapter
from dare_lightning.families.base import PolicyModel
from dare_lightning.families.checkpoint import load_weights, read_config, read_json, resolve_folder
from dare_lightning.families.tokenizer import load_tokenizer


@runtime_checkable
class Family(Protocol):
    """What a family class offers besides `PolicyModel`."""

    def matches(self, config: dict[str, Any]) -> bool:
        """Whether this config.json belongs to the family."""
        ...

    def from_pretrained(self, path: str, **options: Any) -> PolicyModel:
        """Read a checkpoint folder."""
        ...


def families() -> list[Any]:
    """Every family class of the package, in the order of the module names."""
    found: list[Any] = []
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for _, member in inspect.getmembers(module, inspect.isclass):
            own = member.__module__ == module.__name__
            if own and issubclass(member, nn.Module) and isinstance(member, Family):
                found.append(member)
    return found


def find_family(config: dict[str, Any], folder: Path) -> Any:
    """The family class that reads this config.json.

    Raises:
        ValueError: no family does.
    """
    for family in families():
        if family.matches(config):
            return family
    known = ", ".join(family.__name__ for family in families())
    raise ValueError(f"{folder} is {_describe(config)}; no family here reads it (there are {known})")


def check_family(expected: type, config: dict[str, Any], folder: Path) -> None:
    """Compare a checkpoint with the family that is about to read it.

    Raises:
        ValueError: another family reads it (the message names it), or the folder also holds an adapter.
    """
    if (folder / CONFIG_FILE).is_file():
        raise ValueError(
            f"{folder} holds a complete model and an adapter ({CONFIG_FILE}), and nothing says whether the adapter is "
            "merged already; move the adapter files to a folder of their own"
        )
    found = find_family(config, folder)
    if found is not expected:
        raise ValueError(
            f"{folder} is {_describe(config)}, which {expected.__name__} does not read; "
            f"load it with {found.__module__}.{found.__name__} (model={found.__module__.rpartition('.')[2]})"
        )


def read_policy(family: Any, path: str, dtype: str | None, **options: Any) -> Any:
    """Read a checkpoint in the published layout into a policy of this family.

    Args:
        family: the class; built from (config, tokenizer, options).
        path: a folder, or a hub name where no such folder exists.
        dtype: "float32", "bfloat16" or "float16"; None or "auto" keeps what the files hold.
        options: of the family's constructor.

    Raises:
        FileNotFoundError: the folder, or a file in it, is missing.
        ValueError: damaged or foreign weights, another family, an unsupported config.
    """
    folder = resolve_folder(path)
    config = read_config(folder)
    check_family(family, config, folder)
    with torch.device("meta"):
        policy = family(config, load_tokenizer(folder), **options)
    load_weights(policy, folder, dtype)
    policy.source = folder
    return policy


def load_policy(path: str, **options: Any) -> PolicyModel:
    """Read a checkpoint of any family, or an adapter folder together with the base model it names.

    Args:
        path: a folder, or a hub name where no such folder exists.
        options: passed to the family's `from_pretrained`.

    Raises:
        FileNotFoundError: the folder, or a file in it, is missing.
        ValueError: no family reads it, or its content is damaged.
    """
    folder = resolve_folder(path)
    if (folder / CONFIG_FILE).is_file() and not (folder / "config.json").is_file():
        policy = load_policy(_base_of(folder), **options)
        load_adapter(cast(nn.Module, policy), folder)
        return policy
    config = read_config(folder)
    return find_family(config, folder).from_pretrained(str(folder), **options)


def _base_of(folder: Path) -> str:
    base = read_json(folder / CONFIG_FILE).get("base_model_name_or_path")
    if not base:
        raise ValueError(f"{folder} holds an adapter that names no base model; load the base, then the adapter")
    return base


def _describe(config: dict[str, Any]) -> str:
    keys = ("model_type", "architectures", "num_experts")
    said = ", ".join(f"{key}={config[key]!r}" for key in keys if config.get(key) is not None)
    return f"a checkpoint with {said or 'neither model_type nor architectures'}"
