"""How many samples an optimiser step and a micro-batch hold: checks that all data share."""

from __future__ import annotations

from collections.abc import Mapping


def check_positive(sizes: Mapping[str, int]) -> None:
    """Refuse sizes below 1.

    Args:
        sizes: name of the setting in `data` -> its value.

    Raises:
        ValueError: the first that is too small.
    """
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"data.{name}={value} must be at least 1")


def check_group_size(size: int) -> None:
    """Refuse a group of one.

    Raises:
        ValueError: there is nothing to compare an answer with.
    """
    if size < 2:
        raise ValueError(
            f"data.group_size={size}: group-relative advantages compare answers to one prompt; use 2 or more"
        )


def multiples_near(value: int, unit: int) -> str:
    """The multiples of `unit` around `value` that are above 0, as advice: "8 or 12"."""
    lower = value // unit * unit
    return " or ".join(str(number) for number in (lower, lower + unit) if number)


def check_same_split(saved: Mapping[str, int], now: Mapping[str, int]) -> None:
    """Refuse to go on inside an epoch that was split in another way: some samples would be used twice, some never.

    Args:
        saved: what decides the split, as the checkpoint has it.
        now: the same of this run.

    Raises:
        RuntimeError: they differ.
    """
    changed = [name for name, value in saved.items() if now.get(name, value) != value]
    if changed:
        were = ", ".join(f"{name}={saved[name]}" for name in changed)
        are = ", ".join(f"{name}={now[name]}" for name in changed)
        raise RuntimeError(
            f"the checkpoint was taken inside an epoch, with {were}; this run has {are}: resume with what it had,"
            " or from a checkpoint at the end of an epoch"
        )
