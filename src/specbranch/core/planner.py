"""The base classes of planners and predictors, and the settings of planners.

A planner decides what is drafted and what is submitted, never what is accepted. So with exact match (the default) no
planner can change the output distribution. With rejection sampling (`Node.sampled_from`) there is one condition:
whether a sampled token is submitted may depend on the distribution that it was sampled from, not on which token it is,
nor on what follows it.

One planner object serves one sequence. It is called on every verdict, so its methods must return within microseconds.
"""

from __future__ import annotations

import difflib
import math
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Generic, Literal, Protocol, TypeVar, get_args, get_origin, get_type_hints

from specbranch.core.node import Node
from specbranch.core.round import MAX_WINDOW, Round, Signal, Verdict
from specbranch.errors import SpecBranchError

_MAX_NAME = 64  # characters, as on the wire
MAX_ROWS = 64  # draft rows, guesses or branches at a time


class SettingError(SpecBranchError, ValueError):
    """A planner's name, or the name or the value of one of its settings, is not valid."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The lowest and the highest valid value of a number; if `is_open`, these two values are not valid themselves."""

    low: float
    high: float
    is_open: bool = False

    def hold(self, value: float) -> bool:
        """Return whether a value lies within the bounds; NaN does not."""
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
    """Base class of the settings of a planner; an invalid value raises `SettingError`.

    A field is a bool, an int, a float, a str or a `Literal`. `Annotated[int, Bounds(1, 8)]` bounds a number; without
    bounds it must be finite.
    """

    def __post_init__(self) -> None:
        for name, kind in _kinds(type(self)).items():  # type: ignore[arg-type]  # mypy looks for the hash of instances
            value = getattr(self, name)
            advice = _advice(kind, value)
            if advice is not None:
                raise SettingError(f"{type(self).__name__}.{name} is {reprlib.repr(value)}; {advice}")


@cache
def _kinds(settings: type[Settings]) -> dict[str, Any]:
    return get_type_hints(settings, include_extras=True)


def describe_setting(settings: type[Settings], name: str) -> str:
    """Return which values a setting may have, such as "whole number from 1 to 64"."""
    kind, bounds = _type_and_bounds(_kinds(settings)[name])  # type: ignore[arg-type]
    advice = _what(kind, bounds)
    return advice.removeprefix("give a ").removeprefix("give ").removeprefix("choose from ")


def _type_and_bounds(kind: Any) -> tuple[Any, Bounds | None]:
    if get_origin(kind) is not Annotated:
        return kind, None
    number, *notes = get_args(kind)
    return number, next((note for note in notes if isinstance(note, Bounds)), None)


def _what(kind: Any, bounds: Bounds | None = None) -> str:
    """Return which values of a type and within bounds are valid, as an order."""
    if kind is bool:
        return "give true or false"
    if get_origin(kind) is Literal:
        return f"choose from {', '.join(get_args(kind))}"
    if kind is str:
        return "give a text"
    return f"give a {'whole ' if kind is int else ''}number{f' {bounds}' if bounds else ''}"


def _advice(annotation: Any, value: object) -> str | None:
    """Return the part of an error message that says which values are valid for a setting of type `annotation`.

    Return None if `value` is valid.
    """
    kind, bounds = _type_and_bounds(annotation)
    if get_origin(kind) is Literal:
        is_valid = value in get_args(kind)
    elif kind in (bool, str):
        is_valid = isinstance(value, kind)
    elif kind in (int, float):
        is_number = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
        is_valid = is_number and (bounds.hold(value) if bounds else math.isfinite(value))  # type: ignore[arg-type]
    else:
        return f"its type is {kind}; a setting is a bool, an int, a float, a str or a Literal"
    return None if is_valid else _what(kind, bounds)


def suggest(name: str, known: Sequence[str]) -> str:
    """Return the end of an error message about an unknown name: the nearest known name, or else all known names."""
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"it takes {', '.join(known)}" if known else "it takes none"


def check_name(kind: str, name: object) -> None:
    """Raise `SettingError` if `name` cannot be the name of a planner or predictor; `kind` says which, for the error."""
    if not isinstance(name, str) or not 1 <= len(name) <= _MAX_NAME:
        raise SettingError(f"a {kind}'s name is a text of 1 to {_MAX_NAME} characters, not {name!r}")


S = TypeVar("S", bound=Settings)


class Predictor(Protocol):
    """Interface of predictors (H-RAD or a simpler one): how much of the next window of draft tokens is accepted."""

    def predict(self, round: Round) -> Signal:
        """Predict how much of the next window of draft tokens the target accepts; `round` has just begun."""
        ...


class Planner(ABC, Generic[S]):
    """One method of speculative decoding: decides for a sequence what to submit and when, and what to draft next.

    Subclasses are called as `planner(settings, predictor)`, where `settings` is an instance of `settings_type`.
    `specbranch.register_planner` gives a subclass its name.
    """

    settings_type: ClassVar[type[Settings]] = Settings
    # Whether the planner uses its predictor. A trained predictor must be trained for `gamma` tokens then.
    asks_predictor: ClassVar[bool] = False

    def __init__(self, settings: S, predictor: Predictor) -> None:
        self.settings = settings
        self.predictor = predictor

    @property
    def may_block_target(self) -> bool:
        """Whether `submit` may let the target wait; if it never does, the client waits only briefly for a reply."""
        return True

    @property
    def waits_for_prefill(self) -> bool:
        """Whether a target that waits for a draft also waits while the draft model prefills the sequence."""
        return False

    @abstractmethod
    def submit(self, round: Round) -> Sequence[Node] | None:
        """Return the chain below the root to verify now (it may be empty), or None to let the target wait for a draft.

        Called after every verdict, and again after every draft step while the target waits.
        """

    @abstractmethod
    def rows_to_run(self, round: Round) -> Sequence[Node]:
        """Return the nodes whose next-token distributions the next draft step should compute, most valuable first.

        Called between draft steps.
        """

    def submit_after(self, round: Round, start: Node) -> Sequence[Node] | None:
        """Return the chain that `submit` would return if the next verdict committed the tokens up to `start`.

        Return None if the planner cannot know the chain before the verdict. A target with a prefetched draft need not
        wait for a reply.
        """
        return None

    def learn(self, round: Round, verdict: Verdict) -> None:  # most planners learn nothing
        """Update the planner's state from the verdict on this round's submission.

        Called before the verdict moves the root of the tree. The base class changes nothing.
        """
