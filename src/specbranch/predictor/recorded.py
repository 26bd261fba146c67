"""The predictor of a replay: it repeats what H-RAD foresaw at every place of a recorded answer."""

from __future__ import annotations

from collections.abc import Sequence

from specbranch.core.round import Round, Signal


class RecordedPredictor:
    """`signals[i]` stands behind the answer's token i, which is at position i + 1 of the text: 0 is the prompt."""

    def __init__(self, signals: Sequence[Signal]) -> None:
        self._signals = signals

    def predict(self, round: Round) -> Signal:
        place = round.tree.root.position - 1
        return self._signals[place] if 0 <= place < len(self._signals) else Signal.SOME
