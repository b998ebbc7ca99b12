"""argv -> a command. Nothing heavy is imported before the configuration is known to be right."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dare_lightning.cli.arguments import Arguments, parse
from dare_lightning.cli.console import fail
from dare_lightning.cli.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

MODULES = {
    "fit": "dare_lightning.cli.commands.fit",
    "eval": "dare_lightning.cli.commands.evaluate",
    "generate": "dare_lightning.cli.commands.generate",
    "export": "dare_lightning.cli.commands.export",
    "preview": "dare_lightning.cli.commands.preview",
}
"""Command -> module with `run(cfg, run_dir) -> int`."""


def main(argv: Sequence[str]) -> int:
    """Run a command line; returns the exit status: 0 done, 1 failed, 2 not understood, 130 interrupted."""
    show_traceback = "--traceback" in argv or os.environ.get("HYDRA_FULL_ERROR") == "1"
    try:
        if argv[:1] == ["__complete"]:
            from dare_lightning.cli.completion import complete

            print("\n".join(complete(argv[1:])))
            return 0
        return _dispatch(parse(argv), show_traceback)
    except UserError as error:
        fail(str(error), traceback.format_exc() if show_traceback else None)
        return 2
    except KeyboardInterrupt:
        fail("interrupted")
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1


def _dispatch(arguments: Arguments, show_traceback: bool) -> int:
    if arguments.version:
        from dare_lightning import __version__

        print(__version__)
        return 0
    if arguments.command == "completion":
        from dare_lightning.cli.completion import script

        print(script(*arguments.words[:1]))
        return 0
    if arguments.command is None or arguments.help:
        from dare_lightning.cli import help

        print(help.overview() if arguments.command is None else help.command(arguments))
        return 0 if arguments.help or arguments.command is not None else 2
    if arguments.compare is not None:
        from dare_lightning.cli.benchmarks import compare_files

        return compare_files(*arguments.compare)
    if arguments.cfg is not None:
        return _show_config(arguments, arguments.cfg)
    if arguments.multirun or arguments.rerun_failed is not None:
        from dare_lightning.cli.sweep import sweep

        return sweep(arguments)
    return _run(arguments, show_traceback)


def _show_config(arguments: Arguments, part: str) -> int:
    from omegaconf import OmegaConf

    from dare_lightning.cli.inherit import compose_for_checkpoint

    cfg = compose_for_checkpoint(str(arguments.command), arguments.overrides, arguments.config_dirs)
    if part == "job":
        cfg = _without_hydra(cfg)
    elif part == "hydra":
        cfg = OmegaConf.create({"hydra": cfg.hydra})
    node = cfg if arguments.package is None else OmegaConf.select(cfg, arguments.package)
    if node is None:
        from dare_lightning.cli.suggest import hint

        raise UserError(f"--package {arguments.package}: no such part; {hint(str(arguments.package), map(str, cfg))}")
    print(OmegaConf.to_yaml(node, resolve=arguments.resolve) if OmegaConf.is_config(node) else node, end="")
    return 0


def _run(arguments: Arguments, show_traceback: bool) -> int:
    from dare_lightning.cli.checks import check
    from dare_lightning.cli.contents import check_contents
    from dare_lightning.cli.inherit import compose_for_checkpoint, save_composed
    from dare_lightning.cli.run_folder import Run, rank, run_folder, warn_of_earlier_run
    from dare_lightning.cli.tracked import start_tracking_early

    command = str(arguments.command)
    cfg = compose_for_checkpoint(command, arguments.overrides, arguments.config_dirs)
    choices = cfg.hydra.runtime.choices
    cfg = _without_hydra(cfg)
    check(command, cfg, arguments.config_dirs)
    check_contents(cfg)
    if command == "fit" and cfg.ckpt_path is None and rank() == 0:
        warn_of_earlier_run(cfg.run_dir)
    new = cfg.run_dir is None
    folder: Path = run_folder(cfg, command)
    cfg.run_dir = str(folder)
    # A command that goes on with this run needs the same folders of configuration.
    folders = [f"--config-dir={path.resolve()}" for path in arguments.config_dirs]
    with Run(folder, command, [*folders, *arguments.words], show_traceback, new) as run:
        run.save_config(cfg)
        if rank() == 0:
            save_composed(cfg, choices, folder)
            start_tracking_early(cfg)
        run.exit_code = importlib.import_module(MODULES[command]).run(cfg, folder)
    return run.exit_code


def _without_hydra(cfg: DictConfig) -> DictConfig:
    from omegaconf import open_dict

    with open_dict(cfg):
        cfg.pop("hydra")
    return cfg
