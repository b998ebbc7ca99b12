"""The command line: flags are ours, everything else is an override."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from dare_lightning.cli.errors import UserError
from dare_lightning.cli.quoting import quote_path
from dare_lightning.cli.suggest import hint
from dare_lightning.cli.tree import COMMANDS

FLAGS = {
    "--help": "what the command does, its groups, keys and examples",
    "--version": "print the version",
    "--cfg": "print the composed configuration (job, hydra or all) and stop",
    "--resolve": "with --cfg: replace interpolations by their values",
    "--package": "with --cfg: print this part only",
    "--multirun": "run every combination of comma-separated values, each in its own process",
    "--jobs": "with --multirun: processes at the same time (default 1)",
    "--stop-on-failure": "with --multirun: start no further job after a failed one",
    "--rerun-failed": "run the failed jobs of this sweep folder again",
    "--compare": "with eval: two result files, or folders of evaluations, question by question",
    "--config-dir": "another folder laid out as conf/; may be repeated",
    "--traceback": "show the traceback of an error",
}


@dataclass(frozen=True)
class Arguments:
    """A parsed command line.

    Attributes:
        command: one of `COMMANDS` or "completion"; None where none was given.
        overrides: Hydra overrides, paths quoted.
        words: the overrides as they were typed.
        others: see `FLAGS`.
    """

    command: str | None
    overrides: list[str]
    words: list[str]
    help: bool
    version: bool
    cfg: str | None
    resolve: bool
    package: str | None
    multirun: bool
    jobs: int
    stop_on_failure: bool
    rerun_failed: Path | None
    config_dirs: list[Path]
    compare: list[Path] | None
    traceback: bool


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def parse(argv: Sequence[str]) -> Arguments:
    """Read the command line.

    Raises:
        UserError: an unknown command or flag, with the closest ones; a flag's value is missing or wrong.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--package", "-p")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--stop-on-failure", action="store_true")
    parser.add_argument("--rerun-failed", type=Path)
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"))
    parser.add_argument("--config-dir", "-cd", type=Path, action="append", default=[], dest="config_dirs")
    parser.add_argument("--traceback", action="store_true")
    known, unknown = parser.parse_known_intermixed_args(list(argv))
    if unknown:
        raise UserError(f"{unknown[0]} is not an option; {hint(unknown[0].split('=')[0], FLAGS)}")
    command, words = (known.words[0], known.words[1:]) if known.words else (None, [])
    if command is not None and command not in (*COMMANDS, "completion"):
        raise UserError(f"{command} is not a command; {hint(command, [*COMMANDS, 'completion'])}")
    if known.compare is not None and command != "eval":
        raise UserError("--compare belongs to eval: python -m dare_lightning eval --compare A B")
    if known.jobs < 1:
        raise UserError(f"--jobs {known.jobs}: must be at least 1")
    for folder in known.config_dirs:
        if not folder.is_dir():
            raise UserError(f"--config-dir {folder}: no such folder")
    fields = {name: value for name, value in vars(known).items() if name != "words"}
    overrides = [quote_path(word, sweep=known.multirun) for word in words]
    return Arguments(command=command, overrides=overrides, words=words, **fields)
