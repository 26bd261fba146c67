"""Expect the next window of draft tokens to fare as the last one did: texts have easy and hard stretches."""

from specbranch import Round, Signal


class StretchPredictor:
    """Predicts for one sequence; a planner that asks its predictor does so once after each verdict."""

    def __init__(self, few: int = 1, many: int = 8) -> None:
        self._few, self._many = few, many  # tokens of a verdict that make a stretch hard or easy
        self._position, self._last = 0, Signal.SOME

    def predict(self, round: Round) -> Signal:
        """Return how much of the next window will be accepted, from how many tokens the last verdict committed."""
        committed, self._position = round.tree.root.position - self._position, round.tree.root.position
        if committed <= self._few and self._last != Signal.NONE:  # after a window of nothing, one token says nothing
            self._last = Signal.NONE
        else:
            self._last = Signal.ALL if committed >= self._many else Signal.SOME
        return self._last
