"""Overrides -> one checked configuration, with mistakes explained before anything heavy is imported."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dare_lightning.cli.diagnose import explain, unreadable
from dare_lightning.cli.errors import UserError
from dare_lightning.cli.tree import PACKAGED, ConfTree

ASSETS = Path(__file__).resolve().parent.parent / "assets"


def compose(command: str, overrides: Sequence[str], config_dirs: Sequence[Path] = ()) -> DictConfig:
    """The configuration of a command, with Hydra's own node under `hydra`; interpolations are not resolved yet.

    Args:
        command: the name of a file in `conf/`.
        overrides: in Hydra's grammar, paths quoted already.
        config_dirs: more folders laid out as `conf/`.

    Raises:
        UserError: something is misspelt or does not fit; every mistake found is listed.
    """
    OmegaConf.register_new_resolver("asset", asset, replace=True)
    tree = ConfTree(config_dirs)
    try:
        with hydra.initialize_config_dir(str(PACKAGED), job_name=command, version_base="1.3"):
            words = [*_without_null_groups(command, overrides, tree), *_search(config_dirs)]
            return hydra.compose(command, words, return_hydra_config=True)
    # Hydra raises ValueError for a value that no group can take.
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise explain(command, overrides, tree, error) from error


def compose_lenient(command: str, overrides: Sequence[str], config_dirs: Sequence[Path] = ()) -> DictConfig:
    """Compose with as many of the overrides as fit; for help, which must work while a line is being written."""
    fitting: list[str] = []
    for override in overrides:
        try:
            compose(command, [*fitting, override], config_dirs)
        except UserError:
            continue
        fitting.append(override)
    return compose(command, fitting, config_dirs)


def asset(name: str) -> str:
    """Folder of a data set or model that ships with the package; `${asset:name}` in YAML."""
    return str(ASSETS / name)


def expand_sweep(overrides: Sequence[str]) -> list[list[str]]:
    """Every combination of the values of a sweep, in Hydra's grammar (`a=1,2`, `range(1,4)`, `choice(a,b)`, `glob(*)`).

    Raises:
        UserError: an override cannot be read, or sweeps over a continuous interval.
    """
    loader = ConfigLoaderImpl(create_config_search_path(str(PACKAGED)))
    values: list[list[str]] = []
    for text in overrides:
        try:
            parsed = OverridesParser.create(config_loader=loader).parse_overrides([text])[0]
        except HydraException as error:
            raise UserError(unreadable(text, error)) from error
        if not parsed.is_sweep_override():
            values.append([text])
        elif parsed.is_discrete_sweep():
            key = parsed.get_key_element()
            values.append([f"{key}={value}" for value in parsed.sweep_string_iterator()])
        else:
            raise UserError(f"{text}: an interval needs a sweeper that draws from it, e.g. hydra/sweeper=optuna")
    return [list(job) for job in itertools.product(*values)]


def multirun_with_plugins(
    command: str, overrides: Sequence[str], config_dirs: Sequence[Path], folder: Path, task: Callable[..., Any]
) -> str:
    """Hydra's own multirun, for its launcher and sweeper plugins; returns what a plugin raised, "" where nothing.

    Args:
        folder: of the sweep; job n gets `folder/n`.
        task: called with each job's configuration, possibly in another process.
    """
    quiet = [
        f"hydra.sweep.dir='{folder.resolve()}'",
        "hydra.sweep.subdir='${hydra.job.num}'",
        "hydra.output_subdir=null",
        "hydra/job_logging=disabled",
        "hydra/hydra_logging=disabled",
    ]
    OmegaConf.register_new_resolver("asset", asset, replace=True)
    try:
        with hydra.initialize_config_dir(str(PACKAGED), job_name=command, version_base="1.3"):
            runner = GlobalHydra.instance().hydra
            assert runner is not None
            words = [*quiet, *overrides, *_search(config_dirs)]
            runner.multirun(command, task, words, with_log_configuration=False)
    except (HydraException, OmegaConfBaseException, RuntimeError, ImportError) as error:
        return " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    return ""


def _without_null_groups(command: str, overrides: Sequence[str], tree: ConfTree) -> list[str]:
    """`group=null` in words that Hydra knows: its option `none`, or nothing where the group is empty anyway."""
    defaults = tree.defaults(command)
    kept = []
    for text in overrides:
        group, _, value = text.partition("=")
        if value != "null" or group not in defaults:
            kept.append(text)
        elif "none" in tree.options(group):
            kept.append(f"{group}=none")
        elif defaults[group]:
            kept.append(text)
    return kept


def _search(config_dirs: Sequence[Path]) -> list[str]:
    folders = ",".join(f"'file://{folder.resolve()}'" for folder in config_dirs)
    return [f"hydra.searchpath=[{folders}]"] if folders else []
