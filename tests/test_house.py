"""The rules of the house, read from the source: who imports whom, sizes, docstrings, words."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.shared import ROOT

# Each row imports from the rows below it, and a package from itself.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("cli",),
    ("callbacks",),
    ("datamodules",),
    ("methods", "evaluation", "export"),
    ("generation",),
    ("families", "rewards", "parallel"),
    ("replay",),
    ("diffusion",),
)
LEVEL = {package: level for level, row in enumerate(LAYERS) for package in row}
ONLY_IN = {"lightning": {"cli", "callbacks", "datamodules", "methods"}, "hydra": {"cli"}}
OPTIONAL = {"sglang", "lmdeploy", "flash_attn", "cut_cross_entropy", "opencompass", "peft"}
MAX_FILE, MAX_FUNCTION = 400, 50

PACKAGE = sorted(
    [
        *ROOT.glob("dare_lightning/**/*.py"),
        *(path for name in ("callbacks", "datamodules", "conf") for path in ROOT.glob(f"{name}/**/*.py")),
    ]
)
PYTHON = sorted([*PACKAGE, *ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/**/*.py")])
TEXTS = sorted(
    [*PYTHON, *ROOT.glob("conf/**/*.yaml"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"), *ROOT.glob("docker/*")]
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def parts(path: Path) -> tuple[str, ...]:
    """The file's place inside the package: `dare_lightning/cli/app.py` and `callbacks/x.py` start with their layer."""
    relative = path.relative_to(ROOT).parts
    return relative[1:] if relative[0] == "dare_lightning" else relative


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(node: ast.AST) -> Iterator[str]:
    """Full names of the modules that the imports inside `node` name."""
    for found in ast.walk(node):
        if isinstance(found, ast.Import):
            yield from (alias.name for alias in found.names)
        elif isinstance(found, ast.ImportFrom) and found.module:
            yield found.module
            # `from dare_lightning import cli` names its module second.
            if "." not in found.module:
                yield from (f"{found.module}.{alias.name}" for alias in found.names)


@cache
def functions(path: Path) -> list[Function]:
    return [node for node in ast.walk(tree(path)) if isinstance(node, Function)]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_imports_point_to_lower_layers_only() -> None:
    wrong = []
    for path in PACKAGE:
        own = parts(path)[0]
        for module in imported(tree(path)):
            other = module.split(".")[1] if module.startswith("dare_lightning.") else own
            if own in LEVEL and other in LEVEL and other != own and LEVEL[other] <= LEVEL[own]:
                wrong.append(f"{name(path)}: {module}")
    assert wrong == []


def test_every_package_has_a_layer() -> None:
    without_code = {"__init__.py", "__main__.py", "conf"}
    assert {parts(path)[0] for path in PACKAGE} - without_code == set(LEVEL)


@pytest.mark.parametrize("package", ONLY_IN)
def test_the_frameworks_stay_in_their_layers(package: str) -> None:
    users = {parts(path)[0] for path in PACKAGE if package in {m.split(".")[0] for m in imported(tree(path))}}
    assert users <= ONLY_IN[package]


def test_diffusion_knows_torch_alone() -> None:
    allowed = {"torch", "dare_lightning", *sys.stdlib_module_names}
    used = {m.split(".")[0] for p in PACKAGE if parts(p)[0] == "diffusion" for m in imported(tree(p))}
    assert used <= allowed


def test_optional_packages_are_imported_inside_functions() -> None:
    wrong = []
    for path in PACKAGE:
        inside = [module for function in functions(path) for module in imported(function)]
        outside = [m for m in imported(tree(path)) if m.split(".")[0] in OPTIONAL and m not in inside]
        wrong += [f"{name(path)}: {module}" for module in outside]
    assert wrong == []


def test_every_module_imports_without_optional_packages() -> None:
    absent = sorted(OPTIONAL | {"mlflow", "tensorboard", "math_verify", "datasets", "hydra_plugins"})
    modules = sorted({".".join(("dare_lightning", *parts(path.with_suffix("")))) for path in PACKAGE})
    program = (
        "import importlib, sys\n"
        f"for name in {absent}: sys.modules[name] = None\n"
        f"for name in {modules}: importlib.import_module(name.removesuffix('.__init__'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_files_and_functions_are_short() -> None:
    wrong = []
    for path in PYTHON:
        if (lines := path.read_text(encoding="utf-8").count("\n")) > MAX_FILE:
            wrong.append(f"{name(path)}: {lines} lines")
        for function in functions(path):
            assert function.end_lineno is not None
            if (lines := function.end_lineno - function.lineno + 1) > MAX_FUNCTION:
                wrong.append(f"{name(path)}: {lines} lines of {function.name}")
    assert wrong == []


def public(nodes: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Public classes and functions at this level, and the public methods of those classes."""
    for node in nodes:
        # A setter is described by its property.
        setter = any(isinstance(d, ast.Attribute) and d.attr == "setter" for d in getattr(node, "decorator_list", []))
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_") and not setter:
            yield f"{prefix}{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body, f"{node.name}.")


def test_modules_and_public_names_have_docstrings() -> None:
    # `forward` says what its class says; argparse calls `error` by that name.
    inherited = {"forward", "error"}
    wrong = [name(path) for path in PACKAGE if tree(path).body and not ast.get_docstring(tree(path))]
    for path in PACKAGE:
        for where, node in public(tree(path).body):
            if node.name not in inherited and not ast.get_docstring(node):
                wrong.append(f"{name(path)}: {where}")
    assert wrong == []


def test_signatures_are_typed() -> None:
    untyped = []
    for path in PACKAGE:
        for function in functions(path):
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            bare = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
            untyped += [f"{name(path)}: {function.name}({argument})" for argument in bare]
            if function.returns is None:
                untyped.append(f"{name(path)}: {function.name}")
    assert untyped == []


def test_no_broad_handlers_and_no_probing() -> None:
    wrong = []
    for path in PACKAGE:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ExceptHandler) and (
                node.type is None
                or (isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException"))
            ):
                wrong.append(f"{name(path)}:{node.lineno}: broad except")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hasattr":
                wrong.append(f"{name(path)}:{node.lineno}: hasattr")
    assert wrong == []


# Paths of one machine, notes to oneself, and references to documents that are not here.
FORBIDDEN = re.compile(
    "|".join(
        [
            r"(?<![\w.])/(?:work|root|home/\w+|Users)/",
            r"\b(?:TODO|FIXME|XXX|HACK)\b",
            r"\bFR-\d\d\b",
            r"\b(?:style|algorithms|backends|field_reports|models_masked|generation_masked)\.md\b",
        ]
    )
)


def test_texts_speak_of_the_project_alone() -> None:
    wrong = []
    for path in TEXTS:
        if path == Path(__file__).resolve():
            continue
        own = path in PACKAGE
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if FORBIDDEN.search(line) or (own and re.search(r"(?<![\w.])/tmp/", line)):
                wrong.append(f"{name(path)}:{number}: {line}")
    assert wrong == []
