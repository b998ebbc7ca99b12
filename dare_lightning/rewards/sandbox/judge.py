"""The process that runs the tests of one program. It forks the program's process before it reads a single test.

A test is Python that the data set brought, run here, where the program has no say: the functions it calls are stand-ins
that send their arguments to the program's process and return the data that comes back.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, NoReturn

from dare_lightning.rewards.sandbox import jail, program
from dare_lightning.rewards.sandbox.codec import FrameError, decode, encode, receive, send

HELLO_LIMIT = 1000
ESCAPED = 6
"""Bytes that a character of text may take in a frame."""
BOOT = (
    "import sys; sys.path.append(sys.argv.pop(1)); from dare_lightning.rewards.sandbox import program; program.main()"
)
"""What bubblewrap's Python runs; the first argument says where the package lies."""


class ProgramGoneError(BaseException):
    """The program ended, or answered nonsense. Not an `Exception`: a test must not handle it by accident."""


class Link:
    """The way to the program's process."""

    def __init__(self, connection: socket.socket, limit: int) -> None:
        self.connection = connection
        self.limit = limit

    def ask(self, *request: Any) -> list[Any]:
        """One request; its answer, a list whose first item is a word.

        Raises:
            ProgramGoneError: there is none, or it is none.
        """
        try:
            send(self.connection, request)
            answer = receive(self.connection, self.limit)
        except (FrameError, OSError) as error:
            raise ProgramGoneError(str(error)) from error
        if not isinstance(answer, list) or not answer or answer[0] == "exit":
            raise ProgramGoneError("no answer")
        return answer

    def value(self, *request: Any) -> Any:
        """One request whose answer is a value; an exception of the program is raised here as the built-in one."""
        word, *rest = self.ask(*request)
        if word == "raised" and len(rest) == 1:
            kind = vars(builtins).get(str(rest[0]))
            if isinstance(kind, type) and issubclass(kind, StopIteration) and request[:2] != ("apply", "next"):
                raise RuntimeError("the program raised StopIteration")  # which would end a loop of the tests' own
            if isinstance(kind, type) and issubclass(kind, Exception):
                raise ValueError(rest[0]) if kind in _NEED_ARGUMENTS else kind()
        if word != "value" or len(rest) != 1:
            raise ProgramGoneError(f"answered {word!r}")
        try:
            return decode(rest[0], lambda number: Remote(self, number))
        except FrameError as error:
            raise ProgramGoneError(str(error)) from error

    def encoded(self, value: object) -> Any:
        """A value for the program.

        Raises:
            TypeError: it is or holds something that is no data, a function for instance.
        """
        return encode(value, _number)


_NEED_ARGUMENTS = (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError, ExceptionGroup)


class Remote:
    """Stands for an object of the program: a function, or an instance of one of its classes.

    It is equal to nothing but itself, and contains what it yields: the program has no vote in a comparison.
    """

    __slots__ = ("_link", "_number")

    def __init__(self, link: Link, number: int) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        values = [self._link.encoded(argument) for argument in arguments]
        options = {name: self._link.encoded(argument) for name, argument in named.items()}
        return self._link.value("call", self._number, values, options)

    def _apply(self, what: str, *arguments: Any) -> Any:
        return self._link.value("apply", what, self._number, [self._link.encoded(a) for a in arguments])

    def __getattr__(self, name: str) -> Any:
        return self._apply("getattr", name)

    def __setattr__(self, name: str, value: object) -> None:
        self._apply("setattr", name, value)

    def __getitem__(self, key: object) -> Any:
        return self._apply("getitem", key)

    def __setitem__(self, key: object, value: object) -> None:
        self._apply("setitem", key, value)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._apply("iter"))

    def __next__(self) -> Any:
        return self._apply("next")

    def __contains__(self, item: object) -> bool:
        return item in list(self)

    def __len__(self) -> int:
        return int(self._apply("len"))

    def __bool__(self) -> bool:
        return self._apply("bool") is True

    def __str__(self) -> str:
        return str(self._apply("str"))

    def __repr__(self) -> str:
        return str(self._apply("repr"))

    def __int__(self) -> int:
        return int(self._apply("int"))

    def __float__(self) -> float:
        return float(self._apply("float"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and other._number == self._number

    def __hash__(self) -> int:
        return hash(self._number)


def _number(value: object) -> int:
    if isinstance(value, Remote):
        return int(value._number)
    raise TypeError(f"a test passes a {type(value).__name__} to the program; only data and the program's own can cross")


# The three kinds of tests.


def run_asserts(tests: Mapping[str, Any], link: Link, scope: dict[str, Any], loaded: Sequence[str]) -> bool:
    """Statements in the scope of the set-up code, with stand-ins for what only the program defines."""
    # Known from here on: the set-up's own stub of the function under test must not answer for it.
    entry = tests.get("entry")
    if entry is not None:
        scope.pop(entry, None)
    wanted = {entry} if entry else set()
    wanted |= free_names([tests["setup"], *tests["statements"]], known=set(scope), entry=entry)
    modules = sys.stdlib_module_names & (wanted - set(loaded) | module_names([tests["setup"], *tests["statements"]]))
    for name in sorted(wanted & set(loaded) - modules):
        scope[name] = link.value("global", name)
    for name in sorted(wanted & modules):
        scope[name] = importlib.import_module(name)
    for statement in tests["statements"]:
        exec(compile(statement, "tests.py", "exec"), scope)
    return True


def free_names(sources: Sequence[str], known: set[str], entry: str | None) -> set[str]:
    """Names that the tests use and nobody but the program can define.

    A built-in's name stays the built-in, unless the tests name nothing else that could be under test (MBPP has a
    task whose function is called `sum`).
    """
    used: set[str] = set()
    bound: set[str] = set(known)
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
    free = used - (bound - {entry})
    ours = {name for name in free if name not in vars(builtins)}
    return ours or free


def module_names(sources: Sequence[str]) -> set[str]:
    """Names that the tests only take attributes of, as of a module: `math.isclose`."""
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    bases = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    names = [node for node in nodes if isinstance(node, ast.Name)]
    return {node.id for node in names if id(node) in bases} - {node.id for node in names if id(node) not in bases}


def run_calls(tests: Mapping[str, Any], link: Link) -> bool:
    """A function's results on given arguments, tuples and lists being the same."""
    function = link.value("method", tests["function"])
    for arguments, accepted in tests["cases"]:
        if _listed(function(*arguments)) not in [_listed(value) for value in accepted]:
            return False
    return True


def _listed(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_listed(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _listed(item) for key, item in value.items()}
    return value


def run_inputs(tests: Mapping[str, Any], link: Link) -> bool:
    """What the program prints for each input; it must end with status 0."""
    for text, expected in tests["cases"]:
        word, *rest = link.ask("feed", text)
        if word != "printed" or len(rest) != 2 or not isinstance(rest[0], str) or rest[1] != 0:
            return False
        if not same_output(rest[0], expected):
            return False
    return True


def same_output(printed: str, expected: str) -> bool:
    """Line by line, without space at the ends; numbers may be written in another way (`1.0` for `1`)."""
    ours, theirs = (text.strip().split("\n") for text in (printed, expected))
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def _same_line(printed: str, expected: str) -> bool:
    if printed.strip() == expected.strip():
        return True
    ours, theirs = printed.split(), expected.split()
    return len(ours) == len(theirs) and all(map(_same_word, ours, theirs))


def _same_word(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    try:
        return Decimal(printed) == Decimal(expected)
    except InvalidOperation:
        return False


# The judge's life.


def judge(job: Mapping[str, Any], link: Link, scope: dict[str, Any]) -> tuple[str, Any]:
    """Status of the program, and a value where the job asks for one."""
    tests = job["tests"]
    kind = tests["kind"]
    word, *rest = link.ask("load", job["sources"], kind == "calls", kind != "inputs")
    if word == "syntax":
        return "unparsed", None
    if word != "names" or not isinstance(rest[0], list):
        return "wrong", None
    if kind == "value":
        return "right", link.value("method", tests["function"])(*tests["arguments"])
    if kind == "asserts":
        passed = run_asserts(tests, link, scope, [name for name in rest[0] if isinstance(name, str)])
    else:
        passed = run_calls(tests, link) if kind == "calls" else run_inputs(tests, link)
    return ("right" if passed else "wrong"), None


def start(place: jail.Place, job: int, reply: int) -> NoReturn:
    """Become the judge of one program. Never returns.

    Writes JSON lines to `reply`: `{"problem"}` where the sandbox itself fails, else `{"pid"}` once the program's
    process is shut in, `{"setup": true}` once the set-up code ran, `{"status"}`. An end before the second is the data
    set's fault, before the third the program's. Exits with 0 where nothing of the program is left.
    """
    status, child = 1, 0
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ours, theirs = socket.socketpair()
        try:
            folder = jail.prepare(place)
            child = os.fork()
            if child == 0:
                _become_program(place, folder, theirs)
            theirs.close()
            program.quiet(ours.fileno(), job, reply, *place.kept)
            hello = receive(ours, HELLO_LIMIT)
            if hello != ["hello"]:
                raise FrameError(str(hello))
            jail.confine_judge(place)
        except (OSError, FrameError) as error:
            _say(reply, {"problem": str(error)})
            os._exit(1)
        _say(reply, {"pid": child})
        _work(job, reply, Link(ours, ESCAPED * place.cell.limits.output + HELLO_LIMIT))
        status = _clean(place.cell, child)
    finally:
        os._exit(status)


def _clean(cell: jail.Cell, child: int) -> int:
    """End the program; 0 where that was all, else the zygote has to look for the rest."""
    if cell.judge_id(0) != cell.program_id(0):
        return 1  # its user is another
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if cell.own_pids:
        return 0  # with its first process every process of a namespace ends
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return 0  # orphans of the program would be children of this process
    return 1


def _work(job_file: int, reply: int, link: Link) -> None:
    with open(job_file, encoding="utf-8") as file:
        job = json.load(file)
    tests = job["tests"]
    scope: dict[str, Any] = {"__name__": "tests"}
    exec(compile(tests.get("setup", ""), "tests.py", "exec"), scope)
    _say(reply, {"setup": True})
    with program.Caught() as caught:
        status, value = judge(job, link, scope)
    if caught.raised is not None:
        status, value = "wrong", None
    _say(reply, {"status": status, **({} if value is None else {"value": value})})


def _become_program(place: jail.Place, folder: str, link: socket.socket) -> NoReturn:
    cell = place.cell
    if cell.level != "bubblewrap":
        program.start(link, place, folder)
    try:
        user = cell.program_id(place.slot)
        if user is not None:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        program.close_all_but(link.fileno(), first=3)
        os.set_inheritable(link.fileno(), True)
        words = ["-P", "-s", "-B", *([] if cell.packages else ["-S"]), "-c", BOOT, jail.CODE]
        settings = (link.fileno(), place.slot, place.name, place.tasks, cell.to_dict(), place.paths)
        command = jail.bubblewrap_command(place, [*words, *map(json.dumps, settings)])
        os.execve(command[0], command, {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0"})
    finally:
        os._exit(1)


def _say(reply: int, message: Mapping[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(reply, data) :]
