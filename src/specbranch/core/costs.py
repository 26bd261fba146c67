"""What a step costs: step time as a straight line in rows, given beforehand or learned from what was seen."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from specbranch.core.calibration import Calibration
from specbranch.core.ngram import OutputHistory

# Before the first step with drafts is seen, one is only sent where much of it will be accepted: its cost is unknown.
_FEARED_PRICE, _FEARED_ENTRY = 0.5, 1.0
_FEARFUL_STEPS = 8  # after so many half of that fear is gone
_SURE_STEPS = 16  # with drafts: what fewer have shown may be chance, and fades the faster


@dataclass(frozen=True, slots=True)
class StepCost:
    """Time of one step: `base_s` for the first row, `per_row_s` for each further row.

    `per_prefill_token_s` is for each token that is only read, in prefill; 0 if that is not known.
    """

    base_s: float
    per_row_s: float = 0.0
    per_prefill_token_s: float = 0.0

    def at(self, rows: float) -> float:
        """Time of a step with that many rows."""
        return self.base_s + self.per_row_s * (rows - 1)

    @property
    def share_of_more(self) -> float:
        """Time of a further row as a share of the first row's."""
        return self.per_row_s / max(self.base_s, 1e-9)

    def best_rows(self, gains: Sequence[float]) -> int:
        """How many of the rows with these gains, largest first, give the most gain for the time of the step."""
        totals = accumulate(gains)
        rates = [total / max(self.at(rows), 1e-9) for rows, total in enumerate(totals, start=1)]
        return rates.index(max(rates)) + 1 if rates else 0


class StepTimeModel:
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
        """The fitted line; None before the first sample.

        It never falls in rows, and a further row costs at most what the first one does: a step in which others had the
        processor must not make the first row free.
        """
        if not self._n:
            return None
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        # Samples of one size say nothing of the slope; below this spread a fit would be noise.
        slope = (self._xy / self._n - mean_x * mean_y) / spread if spread > 0.01 else 0.0
        slope = max(slope, 0.0)
        first = mean_y - slope * mean_x
        if slope > first:
            # The best line on which every row costs the same: time over rows, by least squares.
            first = slope = (self._y + self._xy) / (self._n + 2 * self._x + self._xx)
        return StepCost(first, slope)


class TargetTimeModel:
    """A target's step times: those of plain steps and, apart, those of steps with drafts.

    The first draft token of a step may cost more than the next one: a product of one row reads weights another way
    than one of several. So the two kinds have a line each. What was learned of drafts, or feared of them before the
    first, fades while none are submitted, so that they are tried again in the end: soon where few steps have shown it.
    """

    def __init__(self, half_life: float = 256.0) -> None:
        self._half_life = half_life
        self._all, self._plain, self._drafted = StepTimeModel(), StepTimeModel(), StepTimeModel()
        self._num_rows = 1
        self._belief = 0.0  # in what is known of steps with drafts
        self._num_steps = self._num_drafted = 0

    def observe(self, num_rows: int, num_submitted: int, step_s: float) -> None:
        """Take in one step: its sequences, the draft tokens of all of them, its time."""
        tokens = num_rows + num_submitted
        self._num_rows = num_rows
        self._num_steps += 1
        if num_submitted:
            self._belief = 1.0
            self._num_drafted += 1
        else:
            sureness = min(max(self._num_drafted, 1), _SURE_STEPS) / _SURE_STEPS
            self._belief *= 0.5 ** (1 / (self._half_life * sureness))
        self._all.observe(tokens, step_s)
        (self._drafted if num_submitted else self._plain).observe(tokens, step_s)

    @property
    def cost(self) -> StepCost | None:
        """One line over all steps, by the tokens in them; None before the first."""
        return self._all.cost

    @property
    def cold_start_weight(self) -> float:
        """How much to fear of steps with drafts, from 1 to 0, before the first was seen."""
        return 0.0 if self._drafted.cost else 0.5 ** (self._num_steps / _FEARFUL_STEPS)

    @property
    def plain_rate(self) -> float:
        """Tokens per second without drafts, as the batch is now; 0 if that is not known."""
        plain = self._plain.cost
        return self._num_rows / max(plain.at(self._num_rows), 1e-9) if plain else 0.0

    def rate(self, committed: float, submitted: float) -> float:
        """Tokens per second where each sequence of the batch, as it is now, gains and submits so many in a step."""
        cost = self.cost
        return self._num_rows * committed / max(cost.at(self._num_rows * (1 + submitted)), 1e-9) if cost else 0.0

    @property
    def per_token_s(self) -> float:
        """Time of a further draft token."""
        drafted, both = self._drafted.cost, self._all.cost
        if drafted is None or both is None:
            return 0.0
        return self._belief * (drafted.per_row_s or both.per_row_s)

    @property
    def entry_s(self) -> float:
        """Time that each sequence's first draft token takes beyond that of a further one, as the batch is now."""
        drafted, plain = self._drafted.cost, self._plain.cost
        if drafted is None or plain is None or not drafted.per_row_s:
            return 0.0
        without = drafted.at(self._num_rows)  # as if no drafts were in a step of that kind
        return self._belief * max(without - plain.at(self._num_rows), 0.0) / self._num_rows


class TokensPerStep:
    """What a sequence gets out of a step of the target; a step counts half after `half_life` later ones.

    By sequence, so that it still holds when others come or end.
    """

    def __init__(self, half_life: float = 32.0) -> None:
        self._keep = 0.5 ** (1 / half_life)
        self._rows = self._committed = self._submitted = 0.0

    def observe(self, num_rows: int, num_submitted: int, num_committed: int) -> None:
        """Take in one step: its sequences, the draft tokens of all of them, the tokens that they gained."""
        self._rows = self._rows * self._keep + num_rows
        self._submitted = self._submitted * self._keep + num_submitted
        self._committed = self._committed * self._keep + num_committed

    @property
    def submitted(self) -> float:
        """Draft tokens of a sequence in a step; 0 before the first."""
        return self._submitted / self._rows if self._rows else 0.0

    @property
    def committed(self) -> float:
        """Tokens that a sequence gains in a step; 0 before the first."""
        return self._committed / self._rows if self._rows else 0.0


@dataclass(slots=True)
class PairModel:
    """What was learned of a pair: both devices' step times, how often the draft is right, and past answers.

    The target's step time is by the tokens in it, of all sequences together: those to verify and one more for each.
    """

    draft: StepTimeModel = field(default_factory=StepTimeModel)
    target: TargetTimeModel = field(default_factory=TargetTimeModel)
    calibration: Calibration = field(default_factory=Calibration)
    sampled: Calibration = field(default_factory=Calibration)  # of sequences that are sampled by rule B
    history: OutputHistory = field(default_factory=OutputHistory)
    tokens_per_step: TokensPerStep = field(default_factory=TokensPerStep)

    def observe_step(self, num_rows: int, num_submitted: int, num_committed: int, step_s: float) -> None:
        """Take in a step of the target: its sequences, their draft tokens, the tokens that they gained, its time."""
        self.target.observe(num_rows, num_submitted, step_s)
        self.tokens_per_step.observe(num_rows, num_submitted, num_committed)

    def copy_for_one(self) -> PairModel:
        """Copy how often the draft is right, for one sequence to go on learning from; the rest stays shared."""
        return replace(self, calibration=copy.deepcopy(self.calibration), sampled=copy.deepcopy(self.sampled))

    @property
    def min_accept_prob(self) -> float:
        """The chance below which a further draft token is not worth verifying.

        A token in the target's step takes time in which the whole batch would have emitted that many tokens. Where
        verifying is free, everything is worth it.
        """
        return _FEARED_PRICE * self.target.cold_start_weight + min(1.0, self.target.per_token_s * self._rate)

    @property
    def min_gain(self) -> float:
        """What a submission must bring beyond the prices of its tokens, in tokens: the first costs more."""
        return _FEARED_ENTRY * self.target.cold_start_weight + self.target.entry_s * self._rate

    @property
    def _rate(self) -> float:
        """Tokens per second that time is worth: what the batch that runs now gets, or would get without drafts."""
        return max(
            self.target.rate(self.tokens_per_step.committed, self.tokens_per_step.submitted), self.target.plain_rate
        )

    def draft_steps_per_target_step(self, rows: int) -> float | None:
        """The speed ratio c for draft steps of that many rows; None until both devices have been seen."""
        draft, target = self.draft.cost, self.target.cost
        if draft is None or target is None or draft.at(rows) <= 0:
            return None
        return target.at(1) / draft.at(rows)
