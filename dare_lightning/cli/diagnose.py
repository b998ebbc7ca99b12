"""Why a configuration could not be composed, in the user's words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dare_lightning.cli.errors import UserError
from dare_lightning.cli.suggest import closest, hint
from dare_lightning.cli.tree import COMMANDS, PACKAGED, ConfTree


def explain(command: str, overrides: Sequence[str], tree: ConfTree, error: Exception) -> UserError:
    """Look at each override by itself and say what is wrong with it; Hydra's own first line where nothing is."""
    problems: list[str] = []
    fitting: list[str] = []
    values: list[Override] = []
    for text in overrides:
        try:
            parsed = OverridesParser.create().parse_overrides([text])[0]
        except OverrideParseException as unparsed:
            problems.append(unreadable(text, unparsed))
            continue
        problem = _group_problem(command, parsed, tree)
        if problem is not None:
            problems.append(problem)
        elif _is_group(parsed, tree) or parsed.is_hydra_override():
            fitting.append(text)
        else:
            values.append(parsed)
    base = _compose(command, fitting, tree)
    if base is not None:
        problems += [p for value in values if (p := _key_problem(command, value, base, tree)) is not None]
    if problems:
        return UserError(*problems)
    return UserError(" ".join(line.strip() for line in str(error).splitlines() if line.strip()))


def _compose(command: str, overrides: list[str], tree: ConfTree) -> DictConfig | None:
    folders = ",".join(f"'file://{folder.resolve()}'" for folder in tree.folders[1:])
    searched = [*overrides, f"hydra.searchpath=[{folders}]"] if folders else overrides
    try:
        with hydra.initialize_config_dir(str(PACKAGED), job_name=command, version_base="1.3"):
            return hydra.compose(command, searched)
    except (HydraException, OmegaConfBaseException):
        return None


def unreadable(text: str, error: Exception) -> str:
    """What to do about an override that Hydra's grammar rejects."""
    if "=" not in text and not text.startswith("~"):
        near = closest(text, COMMANDS, 1)
        return f"{text}: expected key=value" + (f"; did you mean the command {near[0]}?" if near else "")
    reason = str(error).splitlines()[0]
    return f"{text}: not readable ({reason}); put quotes around the value: key=\"'value'\""


def _is_group(override: Override, tree: ConfTree) -> bool:
    return "." not in override.key_or_group and override.key_or_group in tree.groups()


def _group_problem(command: str, override: Override, tree: ConfTree) -> str | None:
    name = override.key_or_group
    if override.is_hydra_override():
        return None
    if "/" in name:
        return f"{name} is not a group; {hint(name, tree.groups())}"
    if not _is_group(override, tree):
        return None
    if name not in tree.defaults(command):
        return f"{command} has no {name}; it has {', '.join(tree.defaults(command))}"
    if override.is_sweep_override():
        return _needs_multirun(override)
    value = override.value()
    for option in value if isinstance(value, list) else [value]:
        if option is None and tree.defaults(command)[name] and "none" not in tree.options(name):
            return f"{name}=null: a {name} is needed; {hint('', tree.options(name))}"
        if option is not None and str(option) not in tree.options(name):
            return f"{name}={option}: there is no such {name}; {hint(str(option), tree.options(name))}"
    return None


def _needs_multirun(override: Override) -> str:
    text, key = override.input_line or "", override.key_or_group
    if override.value_type == ValueType.SIMPLE_CHOICE_SWEEP:
        values = text.split("=", 1)[1]
        return f"{text}: several values; add --multirun to run each, or write {key}=[{values}] for a list"
    return f"{text}: a sweep; add --multirun"


def _key_problem(command: str, override: Override, base: DictConfig, tree: ConfTree) -> str | None:
    key = override.key_or_group
    if override.is_sweep_override():
        return _needs_multirun(override)
    exists = _exists(base, key)
    if override.is_add() and exists and not override.is_force_add():
        return f"+{key} exists already; leave out the +"
    if exists or override.is_add() or override.is_force_add():
        return None
    group, choice = key.split(".", 1)[0], tree.defaults(command)
    if group in tree.groups() and group not in base:
        if group not in choice:
            return f"{key}: {command} has no {group}; it has {', '.join(choice)}"
        return f"{key}: {group} is switched off here; choose one first, e.g. {group}={_example(tree.options(group))}"
    known = [*keys_of(base), *choice]
    parent = key.rsplit(".", 1)[0]
    message = f"{key} is not a key of {command}; {hint(key, known)}"
    if "." in key and OmegaConf.is_dict(OmegaConf.select(base, parent)) and not closest(key, known):
        message = f"{key} is not a key of {parent}; it has: {', '.join(map(str, OmegaConf.select(base, parent)))}"
    return message


def _exists(base: DictConfig, key: str) -> bool:
    node: object = base
    for part in key.split("."):
        if not isinstance(node, DictConfig):
            return bool(OmegaConf.is_list(node) and part.isdigit())
        if part not in list(node.keys()):
            return False
        node = node._get_node(part)
    return True


def _example(options: Sequence[str]) -> str:
    return next((option for option in options if option != "none"), "...")


def keys_of(node: DictConfig, prefix: str = "") -> Iterable[str]:
    """Dotted names of every key, inner nodes included."""
    for name in node:
        full = f"{prefix}{name}"
        yield full
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            yield from keys_of(child, f"{full}.")
