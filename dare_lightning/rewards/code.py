"""Programming tasks: does the generated program pass the tests?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from dare_lightning.rewards.base import Example, Status, Verdict, check_lengths, report_excluded
from dare_lightning.rewards.code_tests import Tests, UnreadableTestsError, read_tests
from dare_lightning.rewards.sandbox.client import Protection, Sandbox, Wanted
from dare_lightning.rewards.sandbox.jail import Limits

# Nothing is given back, so that a line that is no fence after all takes no quadratic time.
_FENCE = re.compile(r"^[ \t]*+```[ \t]*+(?P<label>[\w+-]*+)[^\n`]*+$", re.MULTILINE)
_PYTHON = ("python", "py", "python3", "")
_MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class _Task:
    """The number of a sample's tests in its batch, and the code that its prompt begins."""

    number: int
    prompt: str

    def sources(self, program: str) -> list[str]:
        """A completion may go on where the prompt stops, or state the whole function once more."""
        return [f"{self.prompt}\n{program}", program] if self.prompt else [program]


class CodeReward:
    """`value` where the program passes all tests of its sample, else 0.

    The program is what `extract_code` finds. It runs in processes of our own (see `Sandbox`) in which it has no
    network, no files but its own, an empty environment and bounded resources, and it never meets the tests: they
    run in another process, which sends it the arguments of each call, or a standard input, and judges the data that
    comes back. A program cannot pass by exiting, by printing, or by changing how things compare.

    "unparsed": no code, or not Python. "timeout": all its tests together took longer than allowed. "excluded": the
    tests cannot be read or do not run without the program.

    Args:
        timeout_s: wall-clock limit of a program with all its tests, seconds. During the first three limits of a batch
            a program gets back the time for which it waited for a processor, up to three limits.
        memory_mb: memory of a program, MiB: the address space of each process, and what they all hold.
        workers: programs at the same time; no more than two for each core start at once.
        protection: "auto", or the level that must be active: "bubblewrap", "namespaces", "filters" or "limits".
        packages: whether programs may import installed packages, NumPy for instance. They may then read these, too.
        processes: processes and threads of a program.
        disk_mb: what it may write, MiB.
        output_mb: what it may print or return, MiB.
        value: reward of a right answer.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        timeout_s: float = 10.0,
        memory_mb: int = 1024,
        workers: int = 8,
        protection: Wanted = "auto",
        packages: bool = False,
        processes: int = 16,
        disk_mb: int = 64,
        output_mb: int = 16,
        value: float = 1.0,
    ) -> None:
        self.value = value
        disk, output = disk_mb * _MEBIBYTE, output_mb * _MEBIBYTE
        limits = Limits(timeout_s, memory_mb * _MEBIBYTE, processes, min(disk, 16 * _MEBIBYTE), disk, output)
        self.sandbox = Sandbox(limits, workers, protection, packages)
        self._settings = (timeout_s, memory_mb, workers, protection, packages, processes, disk_mb, output_mb, value)

    @property
    def protection(self) -> Protection:
        """How programs are shut in here. Starts the sandbox.

        Raises:
            SandboxError: the wanted level does not work on this system.
        """
        return self.sandbox.protection

    def __call__(self, completions: Sequence[str], examples: Sequence[Example]) -> list[Verdict]:
        """One verdict for each completion.

        Raises:
            SandboxError: the wanted level does not work on this system, or the sandbox failed twice in a row.
        """
        check_lengths(completions, examples)
        programs = [extract_code(completion) for completion in completions]
        read: dict[int, _Task | None] = {}
        tests: list[Tests] = []
        jobs: dict[tuple[str, int], list[int]] = {}
        statuses: list[Status] = ["excluded"] * len(programs)
        for row, (program, example) in enumerate(zip(programs, examples, strict=True)):
            if id(example) not in read:
                read[id(example)] = _task(example, tests)
            task = read[id(example)]
            if task is not None and program.strip():
                jobs.setdefault((program, task.number), []).append(row)
            elif task is not None:
                statuses[row] = "unparsed"
        tasks = {task.number: task for task in read.values() if task is not None}
        results = self.sandbox.judge([(tasks[n].sources(program), n) for program, n in jobs], tests)
        for rows, status in zip(jobs.values(), results, strict=True):
            for row in rows:
                statuses[row] = cast(Status, status)
        verdicts = [
            Verdict(self.value if status == "right" else 0.0, status, program)
            for status, program in zip(statuses, programs, strict=True)
        ]
        report_excluded(verdicts, examples, "the tests cannot be read or do not run")
        return verdicts

    def close(self) -> None:
        """End the processes. A later call starts new ones."""
        self.sandbox.close()

    def __enter__(self) -> CodeReward:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as its settings: the receiving process starts its own sandbox."""
        return CodeReward, self._settings


def extract_code(text: str) -> str:
    """The program that a completion states.

    The last fenced block that is labelled as Python or not at all, a last one without its end included; else what
    stands between `[BEGIN]` and `[DONE]` (MBPP's few-shot form), quotes around it taken off; else the whole text.
    """
    blocks = []
    label, start = None, 0
    for fence in _FENCE.finditer(text):
        if label is None:
            label, start = fence["label"].lower(), fence.end() + 1
        elif not fence["label"]:
            blocks.append((label, text[start : fence.start()]))
            label = None
    if label is not None:
        blocks.append((label, text[start:]))
    for label, block in reversed(blocks):
        if label in _PYTHON:
            return block
    return _between_marks(text)


def _between_marks(text: str) -> str:
    before, done, _ = text.partition("[DONE]")
    _, begun, after = before.rpartition("[BEGIN]")
    if not (done or begun):
        return text
    program = after.strip()
    if program[:1] == "'":
        program = program[1:].removesuffix("'")
    return program


def _task(example: Example, tests: list[Tests]) -> _Task | None:
    """A sample's task, its tests appended to the others; None where they cannot be read."""
    try:
        found, prompt = read_tests(example)
    except UnreadableTestsError:
        return None
    tests.append(found)
    return _Task(len(tests) - 1, prompt)
