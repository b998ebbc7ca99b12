"""What composition alone does not catch: missing values, unknown keys, wrong types, paths that are not there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dare_lightning.cli.diagnose import keys_of
from dare_lightning.cli.errors import UserError
from dare_lightning.cli.signatures import unknown_arguments
from dare_lightning.cli.suggest import closest, hint
from dare_lightning.cli.tree import COMMANDS, ConfTree
from dare_lightning.cli.values import wrong_defaults, wrong_values

_INPUT_KEY = re.compile(r"(^|_)(path|paths)$")
_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")


def check(command: str, cfg: DictConfig, config_dirs: Sequence[Path] = ()) -> None:
    """Check a configuration without its `hydra` node; paths that start with `~` are expanded in place.

    Raises:
        UserError: with one line for each problem.
    """
    tree = ConfTree(config_dirs)
    problems = [_missing(key, cfg, tree) for key in _missing_keys(cfg)]
    problems += _unknown_top_level(command, cfg, tree)
    if not problems:
        problems += _unresolvable(cfg)
    if not problems:
        problems += [p for key, value in _inputs(cfg) if (p := _absent(key, value)) is not None]
        problems += _unknown_arguments(cfg)
        problems += dict.fromkeys([*wrong_defaults(cfg, tree.keys(command, {})), *wrong_values(cfg)])
    if problems:
        raise UserError(*problems)


def _missing_keys(cfg: DictConfig) -> list[str]:
    """Unlike OmegaConf's own, resolves nothing: an interpolation may lead to what is missing."""
    return [key for key in keys_of(cfg) if _node(cfg, key)._is_missing()]


def _node(cfg: DictConfig, key: str) -> Any:
    node: Any = cfg
    for part in key.split("."):
        node = node._get_node(part)
    return node


def _missing(key: str, cfg: DictConfig, tree: ConfTree) -> str:
    group, _, rest = key.partition(".")
    names = [f"{group}/{option}" for option in tree.options(group)] if rest else list(COMMANDS)
    comments = [c for name in names if (c := tree.comments(name, "???").get(rest or group))]
    return f"{key} has no value; add {key}=..." + (f" ({comments[0]})" if comments else "")


def _unknown_top_level(command: str, cfg: DictConfig, tree: ConfTree) -> list[str]:
    known = {key.split(".")[0] for key in tree.keys(command, {})} | set(tree.groups())
    return [f"{key} is not a key of {command}; {hint(str(key), known)}" for key in cfg if key not in known]


def _unresolvable(cfg: DictConfig) -> list[str]:
    try:
        OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        where = f"{error.full_key}: " if error.full_key else ""
        return [where + str(error).splitlines()[0]]
    return []


def _inputs(node: DictConfig, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name in node:
        value = node[name]
        if isinstance(value, DictConfig):
            yield from _inputs(value, f"{prefix}{name}.")
        elif _INPUT_KEY.search(str(name)) and value is not None:
            if isinstance(value, str) and value.startswith("~"):
                node[name] = value = str(Path(value).expanduser())
            for item in value if isinstance(value, ListConfig) else [value]:
                yield f"{prefix}{name}", str(item)


def _absent(key: str, value: str) -> str | None:
    path = Path(value)
    if path.exists() or re.search(r"[*?\[]|://", value):
        return None
    parent = path.parent
    while not parent.exists():
        parent, path = parent.parent, parent
    siblings = [p.name for p in parent.iterdir()] if parent.is_dir() else []
    near = [str(parent / name) for name in closest(path.name, siblings)]
    may_be_hub = key.split(".")[0] in ("model", "data", "eval") and _HUB_NAME.match(value) is not None
    local_looking = bool(near) if parent == Path(".") else True
    if may_be_hub and not local_looking:
        return None
    where = "this folder" if parent == Path(".") else str(parent)
    listing = f"closest: {', '.join(near)}" if near else _listing(where, siblings)
    return f"{key}={value}: no such file or folder; {listing}"


def _listing(where: str, siblings: list[str]) -> str:
    shown = sorted(name for name in siblings if not name.startswith("."))
    if not shown:
        return f"{where} is empty"
    return f"{where} has {', '.join(shown[:8])}" + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")


def _unknown_arguments(node: DictConfig, prefix: str = "") -> list[str]:
    problems: list[str] = []
    target: Any = node.get("_target_")
    if isinstance(target, str):
        keys = [str(key) for key in node if not str(key).startswith("_")]
        for key, accepted in unknown_arguments(target, keys):
            problems.append(f"{prefix}{key} is not taken by {target.rsplit('.', 1)[-1]}; {hint(key, accepted)}")
    for name in node:
        child = node[name]
        if isinstance(child, DictConfig):
            problems += _unknown_arguments(child, f"{prefix}{name}.")
    return problems
