"""What the settings of planners may be. Bad values raise when a planner is made, never later."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from specbranch.core.round import MAX_WINDOW
from specbranch.errors import SpecBranchError

MAX_ROWS = 64  # draft rows, guesses or branches at a time


class SettingError(SpecBranchError, ValueError):
    """A planner was asked for with a value or a name that it does not know."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least and the greatest value of a number; if `is_open`, they themselves are left out."""

    low: float
    high: float
    is_open: bool = False

    def hold(self, value: float) -> bool:
        """Whether a value lies within; what is not a number lies nowhere."""
        return self.low < value < self.high if self.is_open else self.low <= value <= self.high

    def __str__(self) -> str:
        if self.is_open:
            return f"between {self.low} and {self.high}, neither of them"
        return f"from {self.low} to {self.high}"


Window = Annotated[int, Bounds(1, MAX_WINDOW)]
Rows = Annotated[int, Bounds(1, MAX_ROWS)]
Share = Annotated[float, Bounds(0, 1)]


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a planner. A field is a bool, a `Literal`, or a number with its bounds; each is held to that."""

    def __post_init__(self) -> None:
        for name, kind in _kinds(type(self)).items():  # type: ignore[arg-type]  # mypy looks for the hash of instances
            value = getattr(self, name)
            advice = _advice(kind, value)
            if advice is not None:
                raise SettingError(f"{type(self).__name__}.{name} is {reprlib.repr(value)}; {advice}")


@cache
def _kinds(settings: type[Settings]) -> dict[str, Any]:
    return get_type_hints(settings, include_extras=True)


def _advice(kind: Any, value: object) -> str | None:
    """What to do about a value; None if it is one of its kind."""
    if kind is bool:
        return None if isinstance(value, bool) else "give true or false"
    if get_origin(kind) is Literal:
        return None if value in get_args(kind) else f"choose from {', '.join(get_args(kind))}"
    number, bounds = get_args(kind)
    types = (int,) if number is int else (int, float)
    if isinstance(value, types) and not isinstance(value, bool) and bounds.hold(value):
        return None
    return f"give a {'whole ' if number is int else ''}number {bounds}"


def suggest(name: str, known: Sequence[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, or all of them."""
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"it takes {', '.join(known)}" if known else "it takes none"
