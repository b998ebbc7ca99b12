"""Paths as a shell pastes them, made readable for Hydra's override grammar."""

from __future__ import annotations

import re
from pathlib import Path

_PATH_KEY = re.compile(r"(^|[._])(path|paths|folder|dir|file|root)$")
_OVERRIDE = re.compile(r"^([~+]{0,2}[\w./@-]+)=(.*)$", flags=re.DOTALL)


def is_path_key(key: str) -> bool:
    """Whether a key holds a path: its last part ends in path, folder, dir, file or root."""
    return _PATH_KEY.search(key) is not None


def quote_path(override: str, sweep: bool = False) -> str:
    """The override with a path value quoted, so that `=`, spaces, commas and brackets in it mean themselves.

    Values that are quoted already, null, interpolations and lists keep their meaning (elements of a list are quoted).

    Args:
        override: as it came from the shell, for example `ckpt_path=runs/a/epoch=1.ckpt`.
        sweep: whether a comma may separate values of a sweep; not where the whole is an existing path.
    """
    match = _OVERRIDE.match(override)
    if match is None or not is_path_key(match[1]):
        return override
    key, value = match[1], match[2]
    if value.startswith("[") and value.endswith("]") and not Path(value).exists():
        return f"{key}=[{','.join(_quoted(part.strip()) for part in _split(value[1:-1]))}]"
    if sweep and re.match(r"^(choice|glob|range|interval)\(.*\)$", value):
        return override
    if sweep and not Path(value).expanduser().exists():
        return f"{key}={','.join(_quoted(part) for part in _split(value))}"
    return f"{key}={_quoted(value)}"


def unquote_path(override: str) -> str:
    """The override as one would type it, where `quote_path` makes the same of it again."""
    match = _OVERRIDE.match(override)
    if match is None or not is_path_key(match[1]) or not re.fullmatch(r"'[^'\\]*'", match[2]):
        return override
    typed = f"{match[1]}={match[2][1:-1]}"
    return typed if quote_path(typed) == override else override


def _split(value: str) -> list[str]:
    """Split at commas outside quotes."""
    return re.findall(r"(?:'[^']*'|\"[^\"]*\"|[^,])+", value)


def _quoted(value: str) -> str:
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    if is_quoted or value in ("", "null", "???") or "${" in value:
        return value
    # Hydra un-escapes backslashes only in front of a quote or at the end.
    escaped = re.sub(r"(\\*)(')", lambda m: m[1] * 2 + "\\'", value)
    escaped = re.sub(r"(\\+)$", lambda m: m[1] * 2, escaped)
    return f"'{escaped}'"
