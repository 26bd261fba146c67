"""What a step costs: step time as a straight line in rows, given beforehand or learned from what was seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from specbranch.core.calibration import Calibration


@dataclass(frozen=True, slots=True)
class StepCost:
    """Time of one step: `first_s` for the first row, `more_s` for each further row."""

    first_s: float
    more_s: float = 0.0

    def at(self, rows: int) -> float:
        """Time of a step with that many rows."""
        return self.first_s + self.more_s * (rows - 1)

    @property
    def share_of_more(self) -> float:
        """Time of a further row as a share of the first row's."""
        return self.more_s / max(self.first_s, 1e-9)

    def best_rows(self, gains: Sequence[float]) -> int:
        """How many of the rows with these gains, largest first, give the most gain for the time of the step."""
        totals = accumulate(gains)
        rates = [total / max(self.at(rows), 1e-9) for rows, total in enumerate(totals, start=1)]
        return rates.index(max(rates)) + 1 if rates else 0


class StepEstimate:
    """A `StepCost` learned online by least squares that forgets: a sample counts half after `half_life` later ones."""

    def __init__(self, half_life: float = 64.0) -> None:
        self._keep = 0.5 ** (1 / half_life)
        # Weighted sums of 1, x, x², y, xy with x = rows - 1.
        self._n = self._x = self._xx = self._y = self._xy = 0.0

    def observe(self, rows: int, step_s: float) -> None:
        """Take in one measured step."""
        x = rows - 1
        self._n = self._n * self._keep + 1
        self._x = self._x * self._keep + x
        self._xx = self._xx * self._keep + x * x
        self._y = self._y * self._keep + step_s
        self._xy = self._xy * self._keep + x * step_s

    @property
    def cost(self) -> StepCost | None:
        """The fitted line, never falling in rows; None before the first sample."""
        if not self._n:
            return None
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        # Samples of one size say nothing of the slope; below this spread a fit would be noise.
        slope = (self._xy / self._n - mean_x * mean_y) / spread if spread > 0.01 else 0.0
        slope = max(slope, 0.0)
        return StepCost(max(mean_y - slope * mean_x, 0.0), slope)


@dataclass(slots=True)
class Costs:
    """What was learned of a pair: both devices' step times, and how often the draft is right."""

    draft: StepEstimate = field(default_factory=StepEstimate)
    target: StepEstimate = field(default_factory=StepEstimate)
    calibration: Calibration = field(default_factory=Calibration)

    def draft_steps_per_target_step(self, rows: int) -> float | None:
        """The speed ratio c for draft steps of that many rows; None until both devices have been seen."""
        draft, target = self.draft.cost, self.target.cost
        if draft is None or target is None or draft.at(rows) <= 0:
            return None
        return target.at(1) / draft.at(rows)
