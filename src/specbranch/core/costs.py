"""The time of a step as a linear function of its rows, and what it costs the target to verify a draft token."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from specbranch.core.calibration import Calibration
from specbranch.core.ngram import OutputHistory

# Until a step with drafts was measured, the cost of drafts is unknown, so only drafts with a large gain are sent.
_COLD_START_PROB, _COLD_START_GAIN = 0.5, 1.0
_COLD_START_STEPS = 8  # steps in which both of these halve
_SMOOTHING = 0.05  # the weight of the newest wait for a draft
_PREFILL_MEMORY = 512  # tokens; a prefill of as many has half of the weight
_MAX_EXCESS = 3.0  # times its estimate that a single slow step counts as
_FADE_HALF_LIFE = 64.0  # target steps without a draft step in which the estimated time of one halves
_WEIGHT_HALF_LIFE = 16.0  # and the weight of the measured ones
_FIRST_ANSWER_LEN = 100.0
_PACE_HALF_LIFE = 64.0
_SURE_STEPS = 16  # with drafts; what was learned from fewer steps may be chance, so it fades faster


@dataclass(frozen=True, slots=True)
class StepCost:
    """The time of one step: `base_s` for the first row, `per_row_s` for each further row.

    `per_prefill_token_s` is the time of each prefill token; 0 if it is not known.
    """

    base_s: float
    per_row_s: float = 0.0
    per_prefill_token_s: float = 0.0

    def at(self, rows: float) -> float:
        """Return the time of a step with this number of rows."""
        return self.base_s + self.per_row_s * (rows - 1)

    @property
    def share_of_more(self) -> float:
        """The time of a further row divided by the time of the first row."""
        return self.per_row_s / max(self.base_s, 1e-9)

    def best_rows(self, gains: Sequence[float]) -> int:
        """Return how many rows a step should have to give the most gain per time; 0 if `gains` is empty.

        `gains` holds the gain of each possible row, such as the probability that it will be used, largest first.
        """
        totals = accumulate(gains)
        rates = [total / max(self.at(rows), 1e-9) for rows, total in enumerate(totals, start=1)]
        return rates.index(max(rates)) + 1 if rates else 0


class StepTimeModel:
    """Learns a `StepCost` from measured steps by least squares; a step's weight halves every `half_life` steps.

    `cost` is the fitted line; None before the first step. A step of over three times the time that the line predicts
    counts as three times, because the machine may have stood still in it; a second one in a row counts in full.
    `max_excess` replaces the three. `num_observed` is the number of measured steps. `prefill_token_s` is the smoothed
    time of a prefill token; 0 before the first.

    Times that were measured on a busy machine may be so long that no further step is run and nothing corrects them. So
    while steps are not worth their time, `fade` lets `cost` shrink until a step is tried again.
    """

    def __init__(self, half_life: float = 64.0, max_excess: float = _MAX_EXCESS) -> None:
        self._max_excess = max_excess
        self.num_observed = 0
        self.cost: StepCost | None = None
        self.prefill_token_s = 0.0
        self._num_without = 0.0  # target steps since the last step
        self._keep = 0.5 ** (1 / half_life)
        self._was_slow = False  # the last step took over three times what the line predicted
        # Weighted sums of 1, x, x², y, xy with x = rows - 1.
        self._n = self._x = self._xx = self._y = self._xy = 0.0

    def observe(self, rows: int, step_s: float) -> float:
        """Add one measured step with this number of rows and this time in seconds, and fit `cost` again.

        Return the time that the step counts as.
        """
        x, max_s = rows - 1, math.inf if self.cost is None else self._max_excess * self._fit().at(rows)
        is_slow = step_s > max_s
        step_s = max_s if is_slow and not self._was_slow else step_s
        self._was_slow = is_slow
        self.num_observed += 1
        keep = self._keep * 0.5 ** (self._num_without / _WEIGHT_HALF_LIFE)
        self._num_without = 0.0
        self._n = self._n * keep + 1
        self._x = self._x * keep + x
        self._xx = self._xx * keep + x * x
        self._y = self._y * keep + step_s
        self._xy = self._xy * keep + x * step_s
        self.cost = self._fit()
        return step_s

    def fade(self, num_steps: float) -> None:
        """Reduce `cost`, because the target has run `num_steps` steps for which no draft step was worth its time.

        It halves every 64 steps. The next `observe` restores it, but with a weight that has halved every 16 steps.
        """
        if self.cost is None:
            return
        self._num_without += num_steps
        factor = 0.5 ** (num_steps / _FADE_HALF_LIFE)
        self.cost = replace(self.cost, base_s=self.cost.base_s * factor, per_row_s=self.cost.per_row_s * factor)

    def observe_prefill(self, num_tokens: int, num_rows: int, step_s: float) -> None:
        """Learn the time of a prefill token from a step that took `step_s` seconds.

        It had `num_tokens` prefill tokens, and `num_rows` rows that count as in `observe`.
        """
        rows_s = self._fit().at(num_rows) if self.cost is not None else 0.0
        token_s = max(step_s - rows_s, 0.0) / num_tokens
        weight = num_tokens / (num_tokens + _PREFILL_MEMORY) if self.prefill_token_s else 1.0
        self.prefill_token_s += weight * (token_s - self.prefill_token_s)

    def _fit(self) -> StepCost:
        """Return the fitted line, on which a further row costs at least nothing and at most as much as the first row.

        Without the upper limit, one slow step with many rows on a busy machine would make the first row free.
        """
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        # Steps of equal size say nothing about the slope; below this spread the fit would be noise.
        slope = (self._xy / self._n - mean_x * mean_y) / spread if spread > 0.01 else 0.0
        slope = max(slope, 0.0)
        first = mean_y - slope * mean_x
        if slope > first:
            # The best line on which every row costs the same: time over rows, by least squares.
            first = slope = (self._y + self._xy) / (self._n + 2 * self._x + self._xx)
        return StepCost(first, slope)


class DecayingMean:
    """A mean in which an observation's weight halves with every `half_life` further observations."""

    def __init__(self, half_life: float) -> None:
        self._keep = 0.5 ** (1 / half_life)
        self._total = self._weight = 0.0

    def observe(self, total: float, count: float = 1.0) -> None:
        """Add one observation of `count` values with this sum."""
        self._total = self._total * self._keep + total
        self._weight = self._weight * self._keep + count

    def value(self, prior: float = 0.0, prior_weight: float = 0.0) -> float:
        """Return the mean, as if there were `prior_weight` more values, each `prior`; `prior` if there are none."""
        weight = self._weight + prior_weight
        return (self._total + prior_weight * prior) / weight if weight else prior


class TokensPerStep:
    """Running averages of the tokens that one sequence submits and commits in a step of the target.

    A step's weight halves every `half_life` steps. The averages are per sequence, so that they still hold when other
    sequences begin or end. `wait_s` is the average wait for drafts before a step.
    """

    def __init__(self, half_life: float = 32.0) -> None:
        self._submitted, self._committed = DecayingMean(half_life), DecayingMean(half_life)
        self.wait_s = 0.0

    def observe(self, num_rows: int, num_submitted: int, num_committed: int) -> None:
        """Add one step to the averages: its `num_rows` sequences, and how many tokens they submitted and committed."""
        self._submitted.observe(num_submitted, num_rows)
        self._committed.observe(num_committed, num_rows)

    def observe_wait(self, wait_s: float) -> None:
        """Add how long the target has waited for drafts before a step."""
        self.wait_s += _SMOOTHING * (wait_s - self.wait_s)

    @property
    def submitted(self) -> float:
        """Average number of draft tokens that a sequence submits in a step; 0 before the first step."""
        return self._submitted.value()

    @property
    def committed(self) -> float:
        """Average number of tokens that a sequence commits in a step; 0 before the first step."""
        return self._committed.value()


class AnswerLength:
    """Learns the mean number of tokens of an answer; an answer's weight halves every `half_life` answers.

    It starts as if there had been one answer of 100 tokens.
    """

    def __init__(self, half_life: float = 16.0) -> None:
        self._keep: float = 0.5 ** (1 / half_life)
        self._num_tokens, self._num_answers = _FIRST_ANSWER_LEN, 1.0

    def begin(self) -> None:
        """Count one answer more."""
        self._num_tokens *= self._keep
        self._num_answers = self._num_answers * self._keep + 1

    def add(self, num_tokens: int) -> None:
        """Count tokens of the answers that have begun."""
        self._num_tokens += num_tokens

    def mean(self, num_unfinished: int) -> float:
        """Return the mean if the newest `num_unfinished` answers go on, and every token is as likely to be the last."""
        unfinished: float = (1 - self._keep**num_unfinished) / (1 - self._keep)
        return self._num_tokens / max(self._num_answers - unfinished, 1.0)


class TargetTimeModel:
    """Learns the times of a target's steps, with and without drafts, and estimates what verifying draft tokens costs.

    The first draft token of a step may cost more than the next one, because a matrix product with one row runs another
    kernel than a product with several rows. So steps with drafts and steps without are fitted by separate lines. While
    no drafts are submitted, the estimated cost decays with a half-life of `half_life` steps, so that drafts are tried
    again later. It decays faster if few steps with drafts were measured.

    `observe` updates all public values:

    - `plain_rate`: tokens per second that the batch of the last step would emit without drafts; 0 if it is not known.
    - `per_token_s`: time that each draft token adds to a step.
    - `entry_s`: extra time of a step with drafts, beyond `per_token_s` for each draft token, divided by its sequences.
    - `min_accept_prob`: the acceptance probability below which a further draft token is not worth verifying. The
      time to verify it counts as the tokens that the whole batch would emit in it: 0 if verifying takes no time.
    - `min_gain`: the least expected gain of a submission worth verifying, in tokens: the expected number of accepted
      tokens, minus `min_accept_prob` for each submitted token.
    - `rate`: tokens per second that the whole batch emits now, or would emit without drafts if that is more; 0 if it is
      not known.
    - `num_rows`: the sequences in the last step.
    """

    def __init__(self, half_life: float = 256.0) -> None:
        self.tokens_per_step = TokensPerStep()
        self._half_life = half_life
        # Steps with drafts may be of another kind, and not slow by chance: each kind has its own bound.
        self._all, self._plain, self._drafted = StepTimeModel(max_excess=math.inf), StepTimeModel(), StepTimeModel()
        self.num_rows = 1
        self._belief = 0.0  # weight of what was learned from steps with drafts: 1 after such a step, then fading
        self._num_steps = self._num_drafted = 0
        self._update_prices()

    def observe(self, num_rows: int, num_submitted: int, step_s: float, num_committed: int = 0) -> None:
        """Add one measured step of the target, and update the estimates of what verifying draft tokens costs.

        The step had `num_rows` sequences and took `step_s` seconds. `num_submitted` draft tokens were verified in it,
        and it committed `num_committed` tokens; both numbers are sums over all sequences.
        """
        tokens = num_rows + num_submitted
        self.num_rows = num_rows
        self._num_steps += 1
        if num_submitted:
            self._belief = 1.0
            self._num_drafted += 1
        else:
            sureness = min(max(self._num_drafted, 1), _SURE_STEPS) / _SURE_STEPS
            self._belief *= 0.5 ** (1 / (self._half_life * sureness))
        step_s = (self._drafted if num_submitted else self._plain).observe(tokens, step_s)
        self._all.observe(tokens, step_s)
        self.tokens_per_step.observe(num_rows, num_submitted, num_committed)
        self._update_prices()

    def observe_wait(self, wait_s: float) -> None:
        """Add how long the target has waited for a draft before a step; the step's own time does not include it."""
        self.tokens_per_step.observe_wait(wait_s)

    @property
    def cost(self) -> StepCost | None:
        """The step time as a linear function of the tokens in the step, which takes the place of rows in `StepCost`.

        These are the draft tokens of all sequences and one more token for each sequence. The line is fitted to all
        steps, with and without drafts. None before the first step.
        """
        return self._all.cost

    def _update_prices(self) -> None:
        rows, both, plain, drafted = self.num_rows, self._all.cost, self._plain.cost, self._drafted.cost
        gained, caution = self.tokens_per_step, 0.0 if drafted else 0.5 ** (self._num_steps / _COLD_START_STEPS)
        self.plain_rate = rows / max(plain.at(rows), 1e-9) if plain else 0.0
        self.per_token_s = self._belief * (drafted.per_row_s or both.per_row_s) if drafted and both else 0.0
        self.entry_s = 0.0
        if drafted and plain and drafted.per_row_s:
            without = drafted.at(rows)  # as if no drafts were in a step of that kind
            self.entry_s = self._belief * max(without - plain.at(rows), 0.0) / rows
        step_s = max(both.at(rows * (1 + gained.submitted)), 1e-9) if both else math.inf
        # Time is priced in tokens per second: what the batch emits now, or would emit without drafts if that is more.
        self.rate = max(rows * gained.committed / (step_s + gained.wait_s), self.plain_rate)
        self.min_accept_prob = _COLD_START_PROB * caution + min(1.0, self.per_token_s * self.rate)
        self.min_gain = _COLD_START_GAIN * caution + self.entry_s * self.rate


@dataclass(slots=True)
class PairModel:
    """What was learned about a pair of models: step times, how often the draft is right, and past answers.

    The target's step time depends on the tokens in the step: the draft tokens of all sequences and one more token for
    each sequence.
    """

    draft: StepTimeModel = field(default_factory=StepTimeModel)
    target: TargetTimeModel = field(default_factory=TargetTimeModel)
    calibration: Calibration = field(default_factory=Calibration)
    sampled: Calibration = field(default_factory=Calibration)  # of sequences that use rejection sampling
    history: OutputHistory = field(default_factory=OutputHistory)
    answer_len: AnswerLength = field(default_factory=AnswerLength)
    # Tokens that a verdict commits without a draft step before it.
    plain_pace: DecayingMean = field(default_factory=lambda: DecayingMean(_PACE_HALF_LIFE))
    first_choice_prob: float = 0.7  # how likely the draft's first choice is accepted, on average

    def observe_first_choice(self, prob: float) -> None:
        """Add the acceptance probability of a first choice of the draft to the average `first_choice_prob`."""
        self.first_choice_prob += _SMOOTHING * (prob - self.first_choice_prob)

    def observe_step(self, num_rows: int, num_submitted: int, num_committed: int, step_s: float) -> None:
        """Add one measured step of the target to its model, and update the estimates of what verifying costs.

        The step had `num_rows` sequences and took `step_s` seconds. `num_submitted` draft tokens were verified in it,
        and it committed `num_committed` tokens; both numbers are sums over all sequences.
        """
        self.target.observe(num_rows, num_submitted, step_s, num_committed)

    def copy_for_one(self) -> PairModel:
        """Return a copy for one sequence that learns alone: the calibrations are copied, all else stays shared."""
        return replace(self, calibration=copy.deepcopy(self.calibration), sampled=copy.deepcopy(self.sampled))

    def draft_steps_per_target_step(self, rows: int) -> float | None:
        """Return the speed ratio c: how many draft steps with `rows` rows fit into one target step with one token.

        Return None until both models were measured.
        """
        draft, target = self.draft.cost, self.target.cost
        if draft is None or target is None or draft.at(rows) <= 0:
            return None
        return target.at(1) / draft.at(rows)
