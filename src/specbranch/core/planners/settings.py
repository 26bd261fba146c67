"""Checks that settings of planners share. Bad values raise when a planner is made, never later."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class SettingError(ValueError):
    """A planner was asked for with a value or a name that it does not know."""


def suggest(name: str, known: Sequence[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, or all of them."""
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"it takes {', '.join(known)}" if known else "it takes none"


def require_positive(settings: object, *names: str) -> None:
    """Each named setting must be a whole number of at least 1."""
    for name in names:
        value = getattr(settings, name)
        if not isinstance(value, int) or value < 1:
            raise SettingError(f"{type(settings).__name__}.{name} is {value!r}; give a whole number of at least 1")


def require_share(settings: object, *names: str) -> None:
    """Each named setting must lie between 0 and 1."""
    for name in names:
        value = getattr(settings, name)
        if not 0 <= value <= 1:
            raise SettingError(f"{type(settings).__name__}.{name} is {value!r}; give a number from 0 to 1")
