"""The predictor of a replay: it repeats what H-RAD foresaw at every position of a recorded answer."""

from __future__ import annotations

from collections.abc import Sequence

from specbranch.core.round import Round, Signal


class RecordedPredictor:
    """`signals[i]` follows the answer's token i; `num_before` tokens of the sequence precede the answer.

    Behind the prompt, where no token of the answer is known yet, nothing was foreseen: the confidence decides.
    """

    def __init__(self, signals: Sequence[Signal], num_before: int) -> None:
        self._signals = signals
        self._num_before = num_before

    def predict(self, round: Round) -> Signal:
        index = round.tree.root.position - self._num_before
        return self._signals[index] if index >= 0 else Signal.SOME
