"""The wheel holds the tree, dependencies are the imports, and the constraints are inside the ranges."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.shared import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DEPENDENCIES = {canonicalize_name(r.name): r for r in map(Requirement, PROJECT["project"]["dependencies"])}
EXTRAS = {
    extra: {canonicalize_name(r.name): r for r in map(Requirement, lines)}
    for extra, lines in PROJECT["project"]["optional-dependencies"].items()
}
MAPPED = ("callbacks", "conf", "datamodules")
SOURCES = [ROOT / name for name in ("dare_lightning", *MAPPED)]
# Imports whose distribution has another name, or that only some hook of another package needs.
DISTRIBUTIONS = {
    "hydra": "hydra-core",
    "yaml": "pyyaml",
    "math_verify": "math-verify",
    "huggingface_hub": "huggingface-hub",
    "mmengine": "mmengine-lite",
}
BUILD_FILES = ("pyproject.toml", "README.md", "LICENSE")


def tree_files() -> set[str]:
    """What belongs to the package, under the names it has once installed."""
    found = set()
    for folder in SOURCES:
        inside = "dare_lightning" if folder.name == "dare_lightning" else f"dare_lightning/{folder.name}"
        for path in folder.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                found.add(f"{inside}/{path.relative_to(folder)}")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a source archive of a clean copy of the tree."""
    copy = tmp_path_factory.mktemp("tree")
    for folder in SOURCES:
        shutil.copytree(folder, copy / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in BUILD_FILES:
        shutil.copy(ROOT / file, copy)
    command = [sys.executable, "-m", "build", "--outdir", str(copy / "dist"), str(copy)]
    installed = [d for d in ("setuptools",) if _at_least(d, "77")]
    if installed:
        command.insert(3, "--no-isolation")
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next((copy / "dist").glob("*.whl"))


def _at_least(distribution: str, version: str) -> bool:
    return Version(metadata.version(distribution)) >= Version(version)


@pytest.mark.slow
def test_the_wheel_holds_exactly_the_tree(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == tree_files()


@pytest.mark.slow
def test_the_wheel_runs_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "import dare_lightning, dare_lightning.conf, dare_lightning.callbacks, dare_lightning.datamodules\n"
        "from dare_lightning.cli.app import main\n"
        "print(dare_lightning.__file__, dare_lightning.conf.__file__)\n"
        "sys.exit(main(['fit', '--cfg', 'job']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    where = done.stdout.splitlines()[0].split()
    assert all(Path(path).is_relative_to(tmp_path / "site") for path in where)
    assert "CoupledGRPO" in done.stdout


def test_every_package_is_listed() -> None:
    setuptools = PROJECT["tool"]["setuptools"]
    found = {str(Path(name).parent).replace("/", ".") for name in tree_files() if name.endswith("__init__.py")}
    assert set(setuptools["packages"]) == found
    assert {p for p in setuptools["package-dir"].values() if p != "dare_lightning"} == set(MAPPED)


def imported_by_the_package() -> set[str]:
    names = set()
    for folder in SOURCES:
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    names |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    names.add(node.module.split(".")[0])
    targets = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "conf").rglob("*.yaml"))
    names |= set(re.findall(r"_target_: (\w+)\.", targets))
    return names - sys.stdlib_module_names - {"dare_lightning"}


def test_every_import_is_declared_and_every_dependency_is_used() -> None:
    used = {canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in imported_by_the_package()}
    optional = {name for extra in ("eval", "sglang", "flash", "fused") for name in EXTRAS[extra]}
    assert used - optional == set(DEPENDENCIES)


def constraints() -> dict[str, Version]:
    pins = [
        Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1] not in ("", "#")
    ]
    return {canonicalize_name(pin.name): Version(next(iter(pin.specifier)).version) for pin in pins}


@pytest.mark.parametrize("part", ["default", "dev"])
def test_constraints_pin_every_dependency_inside_its_range(part: str) -> None:
    pins = constraints()
    wanted = DEPENDENCIES if part == "default" else EXTRAS["dev"]
    assert {name: str(r.specifier) for name, r in wanted.items() if pins[name] not in r.specifier} == {}
    assert pins["torch"] == Version("2.13.0")


@pytest.mark.parametrize(
    ("package", "versions"),
    {
        "torch": ("2.12.1", "2.13.0", "2.14.1"),
        "transformers": ("5.19.0", "5.24.0"),
        "numpy": ("1.26.4", "2.4.6"),
        "datasets": ("3.6.0", "5.2.0"),
        "pyarrow": ("25.0.1",),
        "peft": ("0.21.2",),
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ranges_hold_the_versions_of_the_engines(package: str, versions: tuple[str, ...]) -> None:
    assert all(version in DEPENDENCIES[package].specifier for version in versions)
    assert "26.0.0" not in DEPENDENCIES["pyarrow"].specifier


def test_the_install_commands_are_the_same_everywhere() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    check = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    install = 'pip install -c constraints.txt -e ".[dev]" && pytest'
    assert install in readme
    assert [line for line in check if line == "pytest"]
    assert [
        line for line in check if line.replace(" --quiet --progress-bar off", "") == install.removesuffix(" && pytest")
    ]
