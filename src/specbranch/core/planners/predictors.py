"""Predictors without a neural network: constant, random, oracle, replayed, and sent with the verdict.

No predictor can change the output distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from specbranch.core.distribution import RandomSource
from specbranch.core.round import Round, Signal


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
