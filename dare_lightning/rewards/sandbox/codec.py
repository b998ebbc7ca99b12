"""How values travel between judge and program: JSON frames that can hold nothing but plain data.

Reading a frame never runs code of the sender, and what comes out is made of built-in types alone: an object of a class
that the program wrote, or a subclass of `int` with an obliging `__eq__`, cannot cross. Such an object stays where it is
and travels as a number that names it.
"""

from __future__ import annotations

import builtins
import json
import socket
import struct
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

HEADER = struct.Struct(">I")
PLAIN_BITS = 64
"""Longer integers travel in hexadecimal: reading decimal digits takes quadratic time."""

_VIEWS: Any = (type({}.keys()), type({}.items()))


class FrameError(Exception):
    """The other end is gone, or sent something that is no frame."""


def send(link: socket.socket, message: object) -> None:
    """Send one message, JSON types only."""
    data = json.dumps(message).encode()
    link.sendall(HEADER.pack(len(data)) + data)


def receive(link: socket.socket, limit: int) -> Any:
    """The next message, of at most `limit` bytes.

    Raises:
        FrameError: end of input, a longer message, or no JSON.
    """
    (size,) = HEADER.unpack(_exactly(link, HEADER.size))
    if size > limit:
        raise FrameError(f"{size} bytes, allowed are {limit}")
    try:
        return json.loads(_exactly(link, size))
    except (ValueError, RecursionError) as error:
        raise FrameError("no JSON") from error


def _exactly(link: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        try:
            part = link.recv(min(size, 1 << 20))
        except OSError as error:
            raise FrameError(str(error)) from error
        if not part:
            raise FrameError("the other end closed")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def encode(value: object, name: Callable[[object], int]) -> Any:
    """A value as JSON: scalars as they are, everything else as `[tag, content]`.

    Subclasses of the built-in types lose their class. `name` gives a number to anything that is no data.
    """
    if value is None or value is True or value is False:
        return value
    scalar = _scalar(value)
    if scalar is not None:
        return scalar
    if isinstance(value, dict):
        return ["dict", [[encode(key, name), encode(item, name)] for key, item in dict.items(value)]]
    for tag, kind in _CONTAINERS.items():
        if isinstance(value, kind):
            # Not `iter(value)`: a subclass would answer for itself.
            items: Any = vars(kind)["__iter__"](value)
            return [tag, [encode(item, name) for item in items]]
    if isinstance(value, _VIEWS):
        return ["set", encode(list(value), name)[1]]
    if isinstance(value, range):
        return ["range", [value.start, value.stop, value.step]]
    if isinstance(value, type) and vars(builtins).get(type.__repr__(value)[8:-2]) is value:
        return ["type", type.__repr__(value)[8:-2]]
    if type(value).__module__.partition(".")[0] == "numpy":
        return encode(_plain(value), name)
    return ["ref", name(value)]


def _plain(value: Any) -> Any:
    """A NumPy scalar or array as plain numbers."""
    return value.tolist()


def _scalar(value: object) -> Any:
    if isinstance(value, int):
        return int(value) if int.bit_length(value) <= PLAIN_BITS else ["int", hex(int(value))]
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    if isinstance(value, Decimal):
        return ["decimal", Decimal.__str__(value)]
    if isinstance(value, Fraction):
        return ["fraction", f"{value.numerator:x}/{value.denominator:x}"]
    return None


def _fraction(text: str) -> Fraction:
    numerator, _, denominator = text.partition("/")
    return Fraction(int(numerator, 16), int(denominator, 16))


def _type(name: str) -> type:
    found = vars(builtins)[name]
    if not isinstance(found, type):
        raise ValueError(f"{name} is no type")
    return found


_READERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "bytes": bytes.fromhex,
    "complex": lambda parts: complex(*parts),
    "decimal": Decimal,
    "fraction": _fraction,
    "range": lambda parts: range(*parts),
    "type": _type,
}
_CONTAINERS: dict[str, type] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}


def decode(message: Any, find: Callable[[int], Any]) -> Any:
    """The value that `encode` wrote; `find` gives the object of a number.

    Raises:
        FrameError: no value that `encode` writes.
    """
    if not isinstance(message, list):
        if isinstance(message, dict):
            raise FrameError("no value")
        return message
    if len(message) != 2 or not isinstance(message[0], str):
        raise FrameError("no value")
    tag, content = message
    try:
        if tag in _CONTAINERS:
            return _CONTAINERS[tag]([decode(item, find) for item in content])
        if tag == "dict":
            return {decode(key, find): decode(item, find) for key, item in content}
        if tag in _READERS:
            return _READERS[tag](content)
        if tag == "ref":
            return find(int(content))
    except (TypeError, ValueError, KeyError, ArithmeticError, RecursionError) as error:
        raise FrameError(f"no {tag}: {error}") from error
    raise FrameError(f"unknown tag {tag!r}")
