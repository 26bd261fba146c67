"""The predictor of a replay: it repeats what H-RAD foresaw at every position of a recorded answer."""

from __future__ import annotations

from collections.abc import Sequence

from specbranch.core.round import Round, Signal


class RecordedPredictor:
    """`signals[i]` follows the answer's token i, which is at position i + 1 of the sequence: 0 is the prompt."""

    def __init__(self, signals: Sequence[Signal]) -> None:
        self._signals = signals

    def predict(self, round: Round) -> Signal:
        position = round.tree.root.position - 1
        return self._signals[position] if 0 <= position < len(self._signals) else Signal.SOME
