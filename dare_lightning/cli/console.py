"""Messages to the person at the terminal; rich is imported only when there is something to say."""

from __future__ import annotations


def fail(message: str, traceback: str | None = None) -> None:
    """One error line for each line of the message, on stderr."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True)
    if traceback is not None:
        console.print(Text(traceback.rstrip()))
    for line in message.splitlines():
        console.print(Text.assemble(("error: ", "bold red"), line))


def say(message: str) -> None:
    """A line of information on stderr."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True).print(Text(message))
