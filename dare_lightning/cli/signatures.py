"""What a class takes, read from its source file: importing it would load torch before a typing mistake is found."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import dare_lightning

_PACKAGE = "dare_lightning"
# Others whose sources say what they take.
_OTHERS = ("lightning", "torch")


@dataclass(frozen=True)
class Annotation:
    """The type of an argument as it is written, with the module whose names it uses; None where it has none."""

    module: str
    node: ast.expr | None


def unknown_arguments(target: str, keys: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Those of `keys` that the class or function `target` does not take, each with what it takes.

    Whatever cannot be decided from the source counts as accepted; the constructor itself is the last judge.
    """
    accepted = arguments(target)
    return [] if accepted is None else [(key, sorted(accepted)) for key in keys if key not in accepted]


@cache
def arguments(target: str) -> Mapping[str, Annotation] | None:
    """What the class or function `target` takes; None where that cannot be told."""
    parts = target.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:cut])
        if source(module) is not None:
            return _accepted(module, tuple(parts[cut:]))
    return None


@cache
def source(module: str) -> Path | None:
    """The file of a module; None where it is of no package that is read here."""
    package, *inside = module.split(".")
    relative = Path(*inside)
    for folder in _folders(package):
        for path in ((folder / relative).with_suffix(".py"), folder / relative / "__init__.py"):
            if path.is_file():
                return path
    return None


@cache
def _folders(package: str) -> list[Path]:
    if package == _PACKAGE:
        return [Path(folder) for folder in dare_lightning.__path__]
    spec = find_spec(package) if package in _OTHERS else None  # imports nothing
    return [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]


@cache
def tree(path: Path) -> ast.Module:
    """A parsed source file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def _accepted(module: str, names: tuple[str, ...]) -> dict[str, Annotation] | None:
    path = source(module)
    if path is None or not names:
        return None
    for node in tree(path).body:
        if isinstance(node, ast.ClassDef) and node.name == names[0]:
            return _of_class(module, node) if len(names) == 1 else _of_method(module, node, names[1])
        if isinstance(node, ast.FunctionDef) and node.name == names[0] and len(names) == 1:
            return _parameters(module, node)
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            for alias in node.names:
                if (alias.asname or alias.name) == names[0]:
                    return _accepted(node.module, (alias.name, *names[1:]))
    return None


def _of_class(module: str, node: ast.ClassDef) -> dict[str, Annotation] | None:
    constructor = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    if constructor is not None:
        own = _annotations(module, [*constructor.args.args[1:], *constructor.args.kwonlyargs])
        return own if constructor.args.kwarg is None else _with_bases(module, node, own)
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        fields = [n for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
        own = {ast.unparse(n.target): Annotation(module, n.annotation) for n in fields}
        return _with_bases(module, node, own) if node.bases else own
    return _with_bases(module, node, {}) if node.bases else None


def _with_bases(module: str, node: ast.ClassDef, own: dict[str, Annotation]) -> dict[str, Annotation] | None:
    for base in node.bases:
        inherited = _accepted(module, tuple(ast.unparse(base).split(".")))
        if inherited is None:
            return None
        own = inherited | own
    return own if node.bases else None


def _of_method(module: str, node: ast.ClassDef, name: str) -> dict[str, Annotation] | None:
    method = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == name), None)
    accepted = None if method is None else _parameters(module, method)
    return None if accepted is None else {key: a for key, a in accepted.items() if key not in ("cls", "self")}


def _parameters(module: str, function: ast.FunctionDef) -> dict[str, Annotation] | None:
    if function.args.kwarg is not None:
        return None
    return _annotations(module, [*function.args.args, *function.args.kwonlyargs])


def _annotations(module: str, declared: Sequence[ast.arg]) -> dict[str, Annotation]:
    return {argument.arg: Annotation(module, argument.annotation) for argument in declared}
