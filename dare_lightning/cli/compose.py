"""Overrides -> one checked configuration, with mistakes explained before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dare_lightning.cli.diagnose import explain
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
    searched = list(overrides)
    if config_dirs:
        folders = ",".join(f"'file://{folder.resolve()}'" for folder in config_dirs)
        searched.append(f"hydra.searchpath=[{folders}]")
    try:
        with hydra.initialize_config_dir(str(PACKAGED), job_name=command, version_base="1.3"):
            return hydra.compose(command, searched, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(command, overrides, ConfTree(config_dirs), error) from error


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
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra._internal.utils import create_config_search_path

    loader = ConfigLoaderImpl(create_config_search_path(str(PACKAGED)))
    try:
        parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))
        return [list(job) for job in BasicSweeper.split_arguments(parsed, None)[0]]
    except HydraException as error:
        raise UserError(str(error).splitlines()[0]) from error
