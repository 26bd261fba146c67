"""The predictor that knows: an upper bound for what H-RAD can bring, where the future is at hand (simulation)."""

from __future__ import annotations

from collections.abc import Callable

from specbranch.core.round import Round, Signal


class OraclePredictor:
    """`accepted_from(position)` says how many draft tokens from that position on the target will accept."""

    def __init__(self, accepted_from: Callable[[int], int], window: int) -> None:
        self._accepted_from = accepted_from
        self._window = window

    def predict(self, round: Round) -> Signal:
        accepted = self._accepted_from(round.tree.root.position + 1)
        if accepted == 0:
            return Signal.NONE
        return Signal.ALL if accepted >= self._window else Signal.SOME
