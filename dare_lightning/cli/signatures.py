"""What a class takes, read from its source file: importing it would load torch before a typing mistake is found."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import dare_lightning

_PACKAGE = "dare_lightning"


def unknown_arguments(target: str, keys: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Those of `keys` that the class or function `target` does not take, each with what it takes.

    Only targets inside this package are read. Whatever cannot be decided from the source counts as accepted; the
    constructor itself is the last judge.
    """
    parts = target.split(".")
    if parts[0] != _PACKAGE:
        return []
    for cut in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:cut])
        if _source(module) is not None:
            accepted = _accepted(module, tuple(parts[cut:]))
            return [] if accepted is None else [(key, sorted(accepted)) for key in keys if key not in accepted]
    return []


@cache
def _source(module: str) -> Path | None:
    relative = Path(*module.split(".")[1:])
    for folder in map(Path, dare_lightning.__path__):
        for path in ((folder / relative).with_suffix(".py"), folder / relative / "__init__.py"):
            if path.is_file():
                return path
    return None


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _accepted(module: str, names: tuple[str, ...]) -> set[str] | None:
    """Names of arguments; None where they cannot be told."""
    path = _source(module) if module.split(".")[0] == _PACKAGE else None
    if path is None or not names:
        return None
    for node in _tree(path).body:
        if isinstance(node, ast.ClassDef) and node.name == names[0]:
            return _of_class(module, node) if len(names) == 1 else _of_method(node, names[1])
        if isinstance(node, ast.FunctionDef) and node.name == names[0] and len(names) == 1:
            return _parameters(node)
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            for alias in node.names:
                if (alias.asname or alias.name) == names[0]:
                    return _accepted(node.module, (alias.name, *names[1:]))
    return None


def _of_class(module: str, node: ast.ClassDef) -> set[str] | None:
    constructor = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    if constructor is not None:
        own = {a.arg for a in [*constructor.args.args[1:], *constructor.args.kwonlyargs]}
        return own if constructor.args.kwarg is None else _with_bases(module, node, own)
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        fields = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
        return _with_bases(module, node, fields) if node.bases else fields
    return _with_bases(module, node, set()) if node.bases else None


def _with_bases(module: str, node: ast.ClassDef, own: set[str]) -> set[str] | None:
    for base in node.bases:
        inherited = _accepted(module, tuple(ast.unparse(base).split(".")))
        if inherited is None:
            return None
        own |= inherited
    return own if node.bases else None


def _of_method(node: ast.ClassDef, name: str) -> set[str] | None:
    method = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == name), None)
    if method is None:
        return None
    accepted = _parameters(method)
    return None if accepted is None else accepted - {"cls", "self"}


def _parameters(function: ast.FunctionDef) -> set[str] | None:
    if function.args.kwarg is not None:
        return None
    return {a.arg for a in [*function.args.args, *function.args.kwonlyargs]}
