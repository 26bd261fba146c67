"""The registry of predictors, and those without a neural network: constant, random, oracle, replayed, and told.

No predictor can change the output distribution. Other packages add predictors with `register_predictor`;
`specbranch.extensions` finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from specbranch.core.distribution import RandomSource
from specbranch.core.planner import Predictor, SettingError, check_name, suggest
from specbranch.core.round import Round, Signal

TRAINED = "hrad"  # the name on the wire of a predictor whose signals come with the verdicts
_RESERVED = (TRAINED, "random", "oracle")  # the others of the simulator
_registered: dict[str, type[Predictor]] = {}

P = TypeVar("P", bound=type[Predictor])


class ConstantPredictor:
    """Always predicts the same signal; `Signal.SOME` leaves every decision to the draft's confidence."""

    def __init__(self, signal: Signal) -> None:
        self._signal = signal

    def predict(self, round: Round) -> Signal:
        return self._signal


CONSTANTS: Mapping[str, ConstantPredictor] = {
    "confidence": ConstantPredictor(Signal.SOME),
    "none": ConstantPredictor(Signal.NONE),
    "all": ConstantPredictor(Signal.ALL),
}


class RandomPredictor:
    """Predicts at random whether the target accepts none, some or all of the next draft tokens.

    Each of the three has the same probability, whatever the sequence.
    """

    def __init__(self, chance: RandomSource) -> None:
        self._chance = chance

    def predict(self, round: Round) -> Signal:
        return Signal(self._chance.pick((1, 1, 1)))


class OraclePredictor:
    """Always predicts correctly, for windows of `window` draft tokens.

    `accepted_from(position)` returns how many draft tokens from that position on will be accepted.
    """

    def __init__(self, accepted_from: Callable[[int], int], window: int) -> None:
        self._accepted_from = accepted_from
        self._window = window

    def predict(self, round: Round) -> Signal:
        accepted = self._accepted_from(round.tree.root.position + 1)
        if accepted == 0:
            return Signal.NONE
        return Signal.ALL if accepted >= self._window else Signal.SOME


class ReplayPredictor:
    """Repeats recorded signals: `signals[i]` is the prediction after token i of the answer.

    `num_before` tokens come before the answer. After the last of these no signal was recorded, so `predict` returns
    `Signal.SOME`: the draft's confidence decides.
    """

    def __init__(self, signals: Sequence[Signal], num_before: int) -> None:
        self._signals = signals
        self._num_before = num_before

    def predict(self, round: Round) -> Signal:
        index = round.tree.root.position - self._num_before
        return self._signals[index] if index >= 0 else Signal.SOME


class HintPredictor:
    """Predicts the signal that came with the verdict; without one `Signal.SOME`: the draft's confidence decides."""

    def predict(self, round: Round) -> Signal:
        return Signal.SOME if round.hint is None else round.hint.signal


def predictor_names() -> tuple[str, ...]:
    """Return the names of the predictors that need no trace: those of this package, then those of other packages."""
    return (*CONSTANTS, *_registered)


def register_predictor(name: str) -> Callable[[P], P]:
    """Return a decorator that registers a class of predictors by this name: `@register_predictor("mine")`.

    The class is called without arguments, once for each sequence. A draft service runs in a process of its own. It
    finds the class by an entry point of the group `specbranch.predictors` with the same name; without an entry point
    the name is known in this process alone.
    """
    check_name("predictor", name)

    def register(predictor: P) -> P:
        if not (isinstance(predictor, type) and callable(getattr(predictor, "predict", None))):
            raise SettingError(f"predictor {name!r} is {predictor!r}; give a class with a method predict(round)")
        if name in (*CONSTANTS, *_RESERVED) or _registered.setdefault(name, predictor) is not predictor:
            raise SettingError(f"{name!r} is the name of another predictor already; choose another name")
        return predictor

    return register


def make_predictor(name: str) -> Predictor:
    """Return a predictor for one sequence; raise `SettingError` for an unknown name."""
    if name in _registered:
        return _registered[name]()
    if name not in CONSTANTS:
        raise SettingError(f"no predictor is called {name!r}; {suggest(name, predictor_names())}")
    return CONSTANTS[name]
