"""Whether a value is of the type that its argument is declared with, judged from the source alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from dare_lightning.cli.signatures import Annotation, arguments, source, tree

Alternative = tuple[str, Callable[[Any], bool]]

_SCALARS: Mapping[str, Alternative] = {
    "int": ("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    "float": ("a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    # YAML reads some names as numbers.
    "str": ("text", lambda value: isinstance(value, str | int | float)),
    "None": ("null", lambda value: value is None),
}
_LISTS = ("list", "List", "tuple", "Tuple", "Sequence", "Iterable", "Collection")
_OBJECTS = ("Tensor",)  # no value of a configuration is one
_ONE_OF = "one of "
_MAPPINGS = ("dict", "Dict", "Mapping", "MutableMapping")


class Unknown(Exception):
    """A type that cannot be judged from here."""


def wrong_values(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """A line for every value that its constructor declares otherwise, whole configuration below `node`."""
    target: Any = node.get("_target_")
    declared = arguments(target) if isinstance(target, str) else None
    for name in node:
        value = node[name]
        if isinstance(value, DictConfig):
            yield from wrong_values(value, f"{prefix}{name}.")
        annotation = None if declared is None else declared.get(str(name))
        if annotation is not None and (expected := _expected(value, annotation)) is not None:
            yield f"{_given_as(node, str(name), prefix)}={_shown(value)}: must be {expected}"


def _given_as(node: DictConfig, name: str, prefix: str) -> str:
    """The key that holds the value: an argument often takes it from another one."""
    written: Any = node._get_node(name)
    reference = re.fullmatch(r"\$\{(\w[\w.]*)\}", str(written._value()))
    return f"{prefix}{name}" if reference is None else reference[1]


def wrong_defaults(cfg: DictConfig, defaults: Mapping[str, Any]) -> Iterator[str]:
    """A line for every key of a command itself that is no number, or no flag, where its default is one."""
    for key, default in defaults.items():
        kind = type(default).__name__
        if kind in ("int", "bool") and key in cfg and not _SCALARS[kind][1](cfg[key]):
            yield f"{key}={_shown(cfg[key])}: must be {_SCALARS[kind][0]}"


def _shown(value: Any) -> str:
    if isinstance(value, DictConfig | ListConfig):
        return str(OmegaConf.to_container(value, resolve=True))
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _expected(value: Any, annotation: Annotation) -> str | None:
    """What the argument takes, where that is not the value; None where it is, or cannot be told."""
    described = isinstance(value, DictConfig) and "_target_" in value
    if annotation.node is None or described:
        return None
    try:
        alternatives = list(_alternatives(annotation.module, annotation.node))
    except Unknown:
        return None
    return None if any(fits(value) for _, fits in alternatives) else _said(said for said, _ in alternatives)


def _said(alternatives: Iterable[str]) -> str:
    names = list(dict.fromkeys(alternatives))
    choices = dict.fromkeys(c for name in names if name.startswith(_ONE_OF) for c in name[len(_ONE_OF) :].split(", "))
    number = _SCALARS["float"][0] in names
    others = [n for n in names if not n.startswith(_ONE_OF) and not (number and n == _SCALARS["int"][0])]
    return " or ".join([*([_ONE_OF + ", ".join(choices)] if choices else []), *others])


def _alternatives(module: str, node: ast.expr) -> Iterator[Alternative]:
    """The types of a union, each as people say it and as a test.

    Raises:
        Unknown: one of them cannot be judged, so that anything may fit.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        node = ast.parse(node.value, mode="eval").body
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        yield from _alternatives(module, node.left)
        yield from _alternatives(module, node.right)
        return
    name = ast.unparse(node.value if isinstance(node, ast.Subscript) else node).rsplit(".", 1)[-1]
    inner = _parts(node.slice) if isinstance(node, ast.Subscript) else []
    if name in _SCALARS:
        yield _SCALARS[name]
    elif name in ("Optional", "Union"):
        for part in inner:
            yield from _alternatives(module, part)
        if name == "Optional":
            yield _SCALARS["None"]
    elif name == "Literal":
        known = [ast.literal_eval(part) for part in inner]
        yield _ONE_OF + ", ".join(map(str, known)), lambda value: value in known
    elif name in _LISTS:
        yield _list(module, inner)
    elif name in _MAPPINGS:
        yield "a mapping", lambda value: isinstance(value, DictConfig)
    elif name not in _OBJECTS:
        yield from _alternatives(*_alias(module, name))


def _parts(node: ast.expr) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, ast.Tuple) else [node]


def _list(module: str, inner: list[ast.expr]) -> Alternative:
    of = [part for part in inner if not (isinstance(part, ast.Constant) and part.value is ...)]
    choices = [choice for part in of for choice in _alternatives(module, part)]

    def fits(value: Any) -> bool:
        if not isinstance(value, ListConfig):
            return False
        return not choices or all(any(fits(item) for _, fits in choices) for item in value)

    names = _said(said.removeprefix("a ") for said, _ in choices)
    return "a list" + (f" [{names}, ...]" if names else ""), fits


def _alias(module: str, name: str) -> tuple[str, ast.expr]:
    """The module and the expression behind a name such as `Normalization = Literal["token", "sequence"]`."""
    path = source(module)
    for node in tree(path).body if path is not None else ():
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return module, node.value
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            for imported in node.names:
                if (imported.asname or imported.name) == name:
                    return _alias(node.module, imported.name)
    raise Unknown(name)
