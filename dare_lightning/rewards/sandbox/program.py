"""The process that runs a generated program: loads it, and answers what its judge asks.

Nothing in here is trusted once the program has been loaded: the judge takes what comes back for data.
"""

from __future__ import annotations

import atexit
import builtins
import io
import json
import operator
import os
import random
import select
import socket
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from dare_lightning.rewards.sandbox import jail
from dare_lightning.rewards.sandbox.codec import FrameError, decode, encode, receive, send

NAME = "program"
"""Not `__main__`: a program that is called, and not run, does not run its main part."""
REQUEST_LIMIT = 1 << 30
MAX_DESCRIPTOR = 1 << 20
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
PRELUDE = (
    "import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys\n"
    "from bisect import bisect_left, bisect_right, insort\n"
    "from collections import Counter, OrderedDict, defaultdict, deque\n"
    "from functools import cache, cmp_to_key, lru_cache, reduce\n"
    "from heapq import heapify, heappop, heappush, heappushpop, heapreplace, nlargest, nsmallest\n"
    "from itertools import accumulate, combinations, combinations_with_replacement, groupby, permutations, product\n"
    "from math import ceil, comb, factorial, floor, gcd, inf, isqrt, lcm, log, log2, sqrt\n"
    "from typing import Any, Dict, List, Optional, Set, Tuple, Union\n"
)
"""What the starter code of competition tasks takes for granted."""


class Caught:
    """Runs a block and keeps whatever it raised, exits included."""

    def __init__(self) -> None:
        self.raised: BaseException | None = None

    def __enter__(self) -> Caught:
        return self

    def __exit__(self, kind: type[BaseException] | None, raised: BaseException | None, trace: object) -> bool:
        self.raised = raised
        return True


class Program:
    """One generated program and the objects that its judge has been told of."""

    def __init__(self, link: socket.socket, cell: jail.Cell) -> None:
        self.link = link
        self.cell = cell
        self.objects: list[object] = []
        self.code: types.CodeType | None = None
        self.module = types.ModuleType(NAME)

    def serve(self) -> NoReturn:
        """Answer until the judge is gone."""
        try:
            send(self.link, ["hello"])
            while True:
                name, *arguments = receive(self.link, REQUEST_LIMIT)
                with Caught() as caught:
                    answer: list[Any] = getattr(self, f"do_{name}")(*arguments)
                if isinstance(caught.raised, SystemExit | KeyboardInterrupt | GeneratorExit):
                    answer = ["exit"]
                elif caught.raised is not None:
                    answer = ["raised", _builtin_name(caught.raised)]
                send(self.link, answer)
        except (FrameError, OSError):
            os._exit(0)
        finally:
            os._exit(1)

    def do_load(self, sources: Sequence[str], prelude: bool, run: bool) -> list[Any]:
        """Compile the first source that is Python and, unless it reads standard input, run it; its global names."""
        for source in sources:
            with Caught() as caught:
                self.code = compile(source, "program.py", "exec", dont_inherit=True)
            if caught.raised is None:
                break
        if self.code is None:
            return ["syntax"]
        if not run:
            return ["names", []]
        self._shut()
        sys.modules[NAME] = self.module
        scope = self.module.__dict__
        if prelude:
            exec(PRELUDE, scope)
        exec(self.code, scope)
        names = [name for name, value in scope.items() if not isinstance(value, types.ModuleType)]
        return ["names", [name for name in names if not name.startswith("__")]]

    def do_global(self, name: str) -> list[Any]:
        """The number of a global of the program."""
        return ["value", ["ref", self._name(self.module.__dict__[name])]]

    def do_method(self, name: str) -> list[Any]:
        """The number of a function, or of the method of this name of a new `Solution`."""
        scope = self.module.__dict__
        found = scope[name] if name in scope else getattr(scope["Solution"](), name)
        return ["value", ["ref", self._name(found)]]

    def do_call(self, function: int, arguments: Sequence[Any], named: dict[str, Any]) -> list[Any]:
        """Call an object with values; what it returns."""
        values = [decode(argument, self._find) for argument in arguments]
        options = {name: decode(argument, self._find) for name, argument in named.items()}
        return self._value(self._find(function)(*values, **options))  # type: ignore[operator]

    def do_apply(self, what: str, subject: int, arguments: Sequence[Any]) -> list[Any]:
        """An operation on an object."""
        return self._value(_OPERATIONS[what](self._find(subject), *[decode(a, self._find) for a in arguments]))

    def do_feed(self, text: str) -> list[Any]:
        """Run the program on a standard input; what it printed, and its exit status."""
        output, status = feed(text.encode(errors="surrogatepass"), self._main, self.cell.limits.output)
        if status is None:
            return ["exit"]
        return ["printed", output.decode(errors="replace"), status]

    def _main(self) -> int:
        self._shut()
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        assert self.code is not None
        with Caught() as caught:
            exec(self.code, main.__dict__)
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        if isinstance(caught.raised, SystemExit):
            status = caught.raised.code
            return 0 if status is None else status & 255 if isinstance(status, int) else 1
        return 0 if caught.raised is None else 1

    def _shut(self) -> None:
        random.seed(0)
        if not self.cell.bounded and self.cell.level != "limits":
            jail.forbid_processes()

    def _value(self, value: object) -> list[Any]:
        return ["value", encode(value, self._name)]

    def _name(self, value: object) -> int:
        self.objects.append(value)
        return len(self.objects) - 1

    def _find(self, number: int) -> object:
        return self.objects[number]


def feed(text: bytes, main: Callable[[], int], limit: int) -> tuple[bytes, int | None]:
    """Run `main` in a child with this standard input.

    Returns:
        what it printed, and its exit status; None where it printed more than `limit` bytes.
    """
    in_read, in_write = os.pipe()
    out_read, out_write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.dup2(in_read, 0)
            os.dup2(out_write, 1)
            os.closerange(3, jail.OPEN_FILES)
            sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
            sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
            status = main()
        finally:
            os._exit(status)
    os.close(in_read)
    os.close(out_write)
    output = _exchange(in_write, out_read, text, limit)
    if output is None:
        return b"", None
    _, status = os.waitpid(child, 0)
    return output, os.waitstatus_to_exitcode(status)


def _exchange(in_write: int, out_read: int, text: bytes, limit: int) -> bytes | None:
    """Write and read at the same time, until the reading end is closed; None where the limit is passed."""
    os.set_blocking(in_write, False)
    waiting, output = memoryview(text), bytearray()
    poll = select.poll()
    poll.register(out_read, select.POLLIN)
    poll.register(in_write, select.POLLOUT)
    writing = True
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == in_write:
                try:
                    waiting = waiting[os.write(in_write, waiting[: 1 << 16]) :]
                except BrokenPipeError:
                    waiting = waiting[:0]
                if not waiting and writing:
                    poll.unregister(in_write)
                    os.close(in_write)
                    writing = False
                continue
            part = os.read(out_read, 1 << 16)
            if not part or len(output) > limit:
                os.close(out_read)
                if writing:
                    os.close(in_write)
                return None if part else bytes(output)
            output += part


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "getattr": getattr,
    "setattr": setattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "len": len,
    "iter": list,
    "next": next,
    "str": str,
    "repr": repr,
    "bool": bool,
    "float": float,
    "int": int,
}


def _builtin_name(raised: BaseException) -> str:
    """The nearest class of an exception that every Python has."""
    return next(kind.__name__ for kind in type(raised).__mro__ if vars(builtins).get(kind.__name__) is kind)


def start(link: socket.socket, place: jail.Place, folder: str) -> NoReturn:
    """Become the program's process. Never returns: the stack belongs to others."""
    try:
        quiet(link.fileno(), *place.kept)
        os.environ.clear()
        os.environ.update({**ENVIRONMENT, "HOME": folder, "TMPDIR": folder})
        try:
            if os.getsid(0) != os.getpid():
                os.setsid()
            jail.confine_program(place, folder)
        except OSError as error:
            send(link, ["broken", str(error)])
            os._exit(1)
        close_all_but(link.fileno(), first=3)
        Program(link, place.cell).serve()
    finally:
        os._exit(1)


def quiet(*kept: int) -> None:
    """No standard streams, and no descriptor but the given ones."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    close_all_but(*kept, first=3)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stderr = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), errors="replace")


def close_all_but(*kept: int, first: int) -> None:
    """Close every descriptor from `first` on that is not kept."""
    for descriptor in (*sorted(kept), MAX_DESCRIPTOR):
        os.closerange(first, descriptor)
        first = descriptor + 1


def main() -> NoReturn:
    """Where bubblewrap starts us, with everything on the command line."""
    descriptor, slot, name, tasks, fields, paths = map(json.loads, sys.argv[1:7])
    place = jail.Place(jail.Cell.from_dict(fields), slot, name, tasks, paths, jail.CODE)
    if place.cell.packages:
        sys.path += [path for path in paths if path.endswith("-packages")]
    start(socket.socket(fileno=descriptor), place, jail.BOX)
