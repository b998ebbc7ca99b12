"""How names and values become what an MLflow store can hold, without two names meeting and without losing a value.

Names: ASCII letters, digits and `_ . - /` and the space stay. Every other character becomes `_x<hex>_`, its code point
(`gsm8k@1` -> `gsm8k_x40_1`); so do a slash or a dot that would make the name a different path (leading, trailing or
doubled slashes, a dot that begins a path segment), and an underscore that could be read as the start of such an
escape (`a_x40_` -> `a_x5f_x40_`). The empty name is `_x00_`. A name that is then longer than 230 characters keeps its
first 160 and ends in `_x<sha256 of the whole name>_`. `original_name` reads everything but the last rule back.

Colons never come out of that rule, so they mark what this project adds: `learning_rate:v2` is the second value that a
parameter had (a run resumed with another one).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

MAX_NAME = 230
MAX_VALUE = 6000

_UNSAFE = re.compile(r"[^A-Za-z0-9_./ \-]|_(?=x[0-9a-f])|(?<![^/])[./]|/\Z")
_ESCAPE = re.compile(r"_x([0-9a-f]{1,6})_")
_KEPT_OF_LONG = 160


def stored_name(name: str) -> str:
    """The name under which a metric, parameter or tag is stored; different names stay different."""
    if not name:
        return "_x00_"
    stored = _UNSAFE.sub(lambda found: f"_x{ord(found.group()):x}_", name)
    if len(stored) <= MAX_NAME:
        return stored
    return f"{stored[:_KEPT_OF_LONG]}_x{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()}_"


def original_name(stored: str) -> str:
    """The inverse of `stored_name` for names that were not shortened."""
    if stored == "_x00_":
        return ""
    return _ESCAPE.sub(lambda found: chr(int(found.group(1), 16)), stored)


def stored_value(value: object, whole_in: str) -> str:
    """A parameter's value as text; one that is too long is cut, says so, and names the artifact with all of it."""
    text = value if isinstance(value, str) else _as_text(value)
    if len(text) <= MAX_VALUE:
        return text
    note = (
        f" ... [{len(text)} characters, sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}; whole in {whole_in}]"
    )
    return text[: MAX_VALUE - len(note)] + note


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, keys joined by `/`; lists of plain values stay one value, other lists are numbered."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
            value = {str(place): item for place, item in enumerate(value)}
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{name}/"))
        else:
            flat[name] = value
    return flat


def _as_text(value: object) -> str:
    if isinstance(value, (list, tuple, dict)):
        return json.dumps(value, default=str)
    return str(value)
