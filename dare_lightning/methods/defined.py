"""On which policies a method means something: said by the method, checked here alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dare_lightning.families.kinds import KINDS, Kind


@dataclass(frozen=True)
class Undefined:
    """A kind of policy on which a method, or one of its settings, means nothing.

    Attributes:
        on: the kind.
        because: what the method does, after a colon; `{family}` stands for the policy's name. Ends with the way out,
            unless `instead` is one.
        setting, value: only where the method is set like this; None for always.
        instead: the value of `setting` with which the method is defined there; None where there is none.
    """

    on: Kind
    because: str
    setting: str | None = None
    value: Any = None
    instead: Any = None


def check_defined(
    method: str, undefined: tuple[Undefined, ...], kind: Kind, family: str, settings: Mapping[str, Any]
) -> None:
    """Compare what a method says of itself with a family.

    Args:
        method: its name, for the error.
        undefined: as the method says.
        kind, family: of the policy.
        settings: of the method, as far as they are known; what hangs on another setting is not checked.

    Raises:
        ValueError: the method is not defined on such policies.
    """
    for case in undefined:
        known = case.setting is None or (case.setting in settings and settings[case.setting] == case.value)
        if case.on != kind or not known:
            continue
        asked = method if case.setting is None else f"{method}'s {case.setting}={case.value}"
        others = " and ".join(word for other, word in KINDS.items() if other != kind)
        way_out = "" if case.instead is None else f"; use method.{case.setting}={case.instead}"
        because = case.because.format(family=family)
        raise ValueError(f"{asked} is defined for {others} policies and {family} is not one: {because}{way_out}")
