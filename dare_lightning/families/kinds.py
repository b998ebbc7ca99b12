"""How a family diffuses: what a method may ask for, known from a policy or already from its class."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_type_hints

from dare_lightning.families.base import PolicyModel
from dare_lightning.families.checkpoint import read_config
from dare_lightning.families.load import find_family, load_policy
from dare_lightning.families.policy import BlockPolicy, MaskedPolicy

Kind = Literal["masked", "block"]
KINDS: dict[Kind, str] = {"masked": "masked", "block": "block-diffusion"}
"""Every kind with the word for it."""


def kind_of(policy: PolicyModel) -> Kind:
    """Block-diffusion policies have a block length."""
    return "masked" if policy.block_length is None else "block"


def announced(build: Callable[..., Any], path: str | None) -> tuple[Kind, str] | None:
    """Kind and name of the family that `build` will return, before any weights are read; None where nothing says.

    Args:
        build: a family's `from_pretrained`, `load_policy`, or a function whose annotation names the family.
        path: the checkpoint's folder, if any; asked where `build` reads any family.
    """
    family = _family(build, path)
    if inspect.isclass(family) and issubclass(family, BlockPolicy):
        return "block", family.__name__
    if inspect.isclass(family) and issubclass(family, MaskedPolicy):
        return "masked", family.__name__
    return None


def _family(build: Callable[..., Any], path: str | None) -> Any:
    if build is load_policy:
        folder = None if path is None else Path(path)
        known = folder is not None and (folder / "config.json").is_file()
        return find_family(read_config(folder), folder) if folder is not None and known else None
    if inspect.ismethod(build):
        return build.__self__
    return get_type_hints(build).get("return") if inspect.isfunction(build) else build
