"""The predictor that is told: whoever has the target's features has asked H-RAD already."""

from __future__ import annotations

from specbranch.core.round import Round, Signal


class ToldPredictor:
    """The signal that came with the verdict. Where none came, the draft's confidence decides."""

    def predict(self, round: Round) -> Signal:
        return Signal.SOME if round.outlook is None else round.outlook.signal
