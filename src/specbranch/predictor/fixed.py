"""Predictors that look at nothing: a constant signal, or a random one.

No predictor can change the output distribution.
"""

from __future__ import annotations

from collections.abc import Mapping

from specbranch.core.chance import Chance
from specbranch.core.round import Round, Signal


class ConstantPredictor:
    """Always the same signal. `Signal.SOME` leaves every decision to the draft's confidence."""

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
    """Noise, each signal alike: the worst that a predictor can be."""

    def __init__(self, chance: Chance) -> None:
        self._chance = chance

    def predict(self, round: Round) -> Signal:
        return Signal(self._chance.pick((1, 1, 1)))
