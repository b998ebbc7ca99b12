"""The folder of YAML files read directly, for help, completion and suggestions; no Hydra, so it is quick."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import dare_lightning.conf

PACKAGED = Path(str(dare_lightning.conf.__file__)).resolve().parent
COMMANDS = ("fit", "eval", "generate", "export", "preview")


class ConfTree:
    """Groups, options, keys and comments of the packaged `conf/` and of folders named by the user.

    Args:
        extra: more folders of the same layout (`--config-dir`); files of the packaged folder come first.
    """

    def __init__(self, extra: Sequence[Path] = ()) -> None:
        self.folders = (PACKAGED, *extra)

    def groups(self) -> list[str]:
        """Names of all groups, sorted."""
        found = {p.name for folder in self.folders for p in folder.iterdir() if p.is_dir() and any(p.glob("*.yaml"))}
        # A group may be in a command's defaults before it has an option.
        return sorted((found | {group for command in COMMANDS for group in self.defaults(command)}) - {"hydra"})

    def options(self, group: str) -> list[str]:
        """Names a group can take; files that start with an underscore are parts, not options."""
        found = {
            str(path.relative_to(folder / group).with_suffix(""))
            for folder in self.folders
            for path in (folder / group).rglob("*.yaml")
        }
        return sorted(name for name in found if not name.rpartition("/")[2].startswith("_"))

    def file(self, name: str) -> Path | None:
        """The YAML file of a command or of `group/option`."""
        return next((f for folder in self.folders if (f := folder / f"{name}.yaml").is_file()), None)

    def defaults(self, command: str) -> dict[str, str | list[str] | None]:
        """The command's groups, each with the option it takes by default."""
        chosen: dict[str, str | list[str] | None] = {}
        for item in self._read(command).get("defaults", []):
            if isinstance(item, dict):
                chosen.update(item)
        return chosen

    def about(self, name: str) -> str:
        """The first comment line of a file."""
        path = self.file(name)
        lines = [] if path is None else path.read_text(encoding="utf-8").splitlines()
        comments = (line.lstrip("# ").strip() for line in lines if line.startswith("#") and "@package" not in line)
        return next(comments, "")

    def keys(self, command: str, chosen: dict[str, str | list[str] | None]) -> dict[str, Any]:
        """Dotted keys with the values that the files write, for these choices of groups."""
        found = {key: value for key, value in _flat(self._read(command)) if key != "defaults"}
        for group, option in chosen.items():
            for name in [option] if isinstance(option, str) else option or []:
                found |= {f"{group}.{key}": value for key, value in self._option_keys(group, name)}
        return found

    def comments(self, name: str, value: str = "") -> dict[str, str]:
        """Key -> the comment behind it, for the unnested keys of a file (those with this value, where one is given)."""
        path = self.file(name)
        text = "" if path is None else path.read_text(encoding="utf-8")
        return dict(re.findall(rf"^([A-Za-z_]\w*):\s*{re.escape(value)}[^#\n]*#\s*(.+?)\s*$", text, flags=re.MULTILINE))

    def _option_keys(self, group: str, option: str) -> Iterator[tuple[str, Any]]:
        content = self._read(f"{group}/{option}")
        for item in content.get("defaults", []):
            if isinstance(item, str) and item != "_self_" and "/" not in item:
                yield from self._option_keys(group, item)
        yield from ((key, value) for key, value in _flat(content) if key != "defaults")

    def _read(self, name: str) -> dict[str, Any]:
        path = self.file(name)
        return {} if path is None else _load(path)


@cache
def _load(path: Path) -> dict[str, Any]:
    content = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    return content if isinstance(content, dict) else {}


def _flat(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
