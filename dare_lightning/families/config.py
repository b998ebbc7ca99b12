"""Reading config.json: what is missing, wrong, or means a computation that a family does not do, is named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

Config = dict[str, Any]
T = TypeVar("T")


def require_keys(config: Config, keys: Iterable[str], family: str) -> None:
    """Raise ValueError where keys are missing."""
    missing = [key for key in keys if key not in config]
    if missing:
        raise ValueError(f"config.json of a {family} model lacks {', '.join(missing)}; no value is assumed for them")


def require_values(config: Config, allowed: Mapping[str, tuple[Any, ...]], family: str) -> None:
    """Raise ValueError where a key that is present has another value than those allowed."""
    for key, values in allowed.items():
        if key in config and config[key] not in values:
            said = " or ".join(repr(value) for value in values)
            raise ValueError(f"config.json says {key}={config[key]!r}; {family} here supports {said}")


def whole(config: Config, key: str) -> int:
    """A positive whole number.

    Raises:
        ValueError: it is something else.
    """
    value = number(config, key, "whole number")
    if value != int(value):
        raise _wrong(config, key, "a positive whole number")
    return int(value)


def count(config: Config, key: str) -> int:
    """A whole number, 0 or above.

    Raises:
        ValueError: it is something else.
    """
    return 0 if config[key] == 0 and not isinstance(config[key], bool) else whole(config, key)


def number(config: Config, key: str, kind: str = "number") -> Any:
    """A positive number.

    Raises:
        ValueError: it is something else.
    """
    value = config[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise _wrong(config, key, f"a positive {kind}")
    return value


def switch(config: Config, key: str) -> bool:
    """A truth value.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(config[key], bool):
        raise _wrong(config, key, "true or false")
    return config[key]


def optional(config: Config, key: str, read: Callable[[Config, str], T]) -> T | None:
    """What `read` makes of a key; None where it is absent or null."""
    return None if config.get(key) is None else read(config, key)


def head_dim(width: int, heads: int) -> int:
    """Size of one of `heads` heads that share `width`.

    Raises:
        ValueError: it is not an even whole number, which rotary positions need.
    """
    if width % (2 * heads):
        raise ValueError(f"hidden_size={width} over num_attention_heads={heads} does not give heads of an even size")
    return width // heads


def rotary_dim(config: Config, head_dim: int) -> int:
    """The dimensions of a head that are turned: its share `partial_rotary_factor`, all where that is absent.

    Raises:
        ValueError: not an even number of dimensions.
    """
    factor = optional(config, "partial_rotary_factor", number)
    size = head_dim if factor is None else int(head_dim * factor)
    if size < 2 or size > head_dim or size % 2:
        raise ValueError(
            f"config.json says partial_rotary_factor={factor!r}; of heads of size {head_dim} an even number of"
            " dimensions must remain"
        )
    return size


def _wrong(config: Config, key: str, kind: str) -> ValueError:
    return ValueError(f"config.json says {key}={config[key]!r}; it must be {kind}")
