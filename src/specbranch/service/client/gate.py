"""Switch drafts on and off by measured tokens per second; steps with prefill are not measured.

For every load (rows in the engine's step, in powers of two) the gate measures tokens per second without drafts, then
with drafts, and keeps the faster mode. It measures the other mode again now and then: ever more rarely while that mode
stays slower, and more rarely the more time a measurement with drafts costs, so drafts that are slower cost next to
nothing. While no draft service can be reached, such a measurement costs nothing and is repeated as often as at first.
When drafts become the faster mode at one load after a long time, they are soon measured at the other loads too.

Both modes are measured on one engine: an engine with speculative decoding switched on may be slower than one without,
even in steps without drafts, and the gate does not see that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_PLAIN_STEPS = 8  # of a measurement without drafts
_TRIAL_STEPS = 16  # of a measurement with drafts, a trial
_SETTLE_STEPS = 4  # after a change, which do not count
# A trial begins when the first drafts have come, or after this many steps: a draft has to prefill the sequence first,
# and that must not count.
_MAX_SETTLE_STEPS = 64
# One measurement may be wrong, so the gate first opens for few steps, and for twice as many each time that plain
# decoding loses again.
_FIRST_OPEN_STEPS, _OPEN_STEPS = 64, 512
_CLOSED_STEPS, _MAX_CLOSED_STEPS = 256, 8192  # between two trials
MARGIN = 1.02  # drafts must give this multiple of the tokens per second of plain decoding
_HOPELESS = 0.8  # a trial that gives less than this ends early, and so does the wait for its first drafts
_MAX_LOST = 0.02  # time lost by a trial, as a share of the time until the next trial


@dataclass(slots=True)
class _Rate:
    """Tokens per second over the last steps; a step's weight halves every 32 steps."""

    tokens: float = 0.0
    seconds: float = 0.0
    steps: int = 0

    def observe(self, tokens: int, seconds: float) -> None:
        keep = 0.5 ** (1 / 32)
        self.tokens = self.tokens * keep + tokens
        self.seconds = self.seconds * keep + seconds
        self.steps += 1

    @property
    def value(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


@dataclass(slots=True)
class _Load:
    """The measurements and the decision for one load: steps with at most `max_rows` and more than half as many rows."""

    max_rows: int
    closed_steps: int
    is_open: bool = False
    is_measuring: bool = True
    open_steps: int = 0  # steps that the gate is open for; 0 while it is closed
    plain: _Rate = field(default_factory=_Rate)
    drafted: _Rate = field(default_factory=_Rate)
    awaiting: _Rate = field(default_factory=_Rate)  # steps of a trial before its first drafts came
    steps: int = 0  # since the last decision


@dataclass(frozen=True, slots=True)
class Decision:
    """The result of measuring steps of at most `max_rows` rows: tokens per second with drafts and without."""

    max_rows: int  # steps of half as many rows, or fewer, are another load
    is_open: bool
    drafted: float
    plain: float
    num_steps: int  # until both ways are compared again

    @property
    def rows(self) -> str:
        """The numbers of rows of this load as text, such as "5-8"."""
        fewest = self.max_rows // 2 + 1
        return f"{fewest}-{self.max_rows}" if fewest < self.max_rows else f"{self.max_rows}"


class Gate:
    """Decides before each engine step whether drafts are faster than none (`is_open`), from steps given to `observe`.

    It reads no clock: the caller passes the time of each step.
    """

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}
        self.decisions: dict[int, Decision] = {}  # the last one of each load, by its `max_rows`
        self._was_open = False
        self._since_change = 0
        self._has_seen_drafts = False

    @property
    def was_open(self) -> bool:
        """The last result of `is_open`; False before its first call."""
        return self._was_open

    def interrupt(self) -> None:
        """Exclude at least the next 4 steps from the measurements; with drafts on, all steps until drafts have come.

        What ran before these steps, such as other settings, still affects them.
        """
        self._since_change = 0
        self._has_seen_drafts = False
        for load in self._loads.values():
            load.awaiting = _Rate()

    def is_open(self, num_rows: int) -> bool:
        """Decide whether the next step, which has `num_rows` rows, should have drafts, and return the decision.

        After a change of the decision, the first 4 steps are not measured.
        """
        is_open = self._load(num_rows).is_open
        if is_open != self._was_open:
            self._was_open = is_open
            self.interrupt()
        return is_open

    def observe(self, num_rows: int, num_tokens: int, step_s: float, has_drafts: bool = True) -> None:
        """Add one finished step to the measurements, and switch drafts on or off if enough steps were measured.

        Call this only for a step in which no row was in prefill, and before `is_open` is called for the next step. The
        step counts as one with drafts if `is_open` last returned True. It is not measured if it is among the first 4
        after a change of that answer or after `interrupt`, if the first drafts have not come yet, or if the decision
        for its own number of rows differs from that answer.

        The step had `num_rows` rows and took `step_s` seconds. `num_tokens` is the number of new tokens of all rows
        together, and `has_drafts` is whether the step verified draft tokens.
        """
        load = self._load(num_rows)
        self._since_change += 1
        # The first steps after a change still show the other way: sequences in prefill, drafts on their way.
        is_settled = self._since_change > _SETTLE_STEPS and (
            not load.is_open or self._has_seen_drafts or self._stop_waiting_for_drafts(load, num_tokens, step_s)
        )
        self._has_seen_drafts |= has_drafts
        if load.is_open != self._was_open or not is_settled:
            return
        (load.drafted if load.is_open else load.plain).observe(num_tokens, step_s)
        load.steps += 1
        self._decide(load)

    def _stop_waiting_for_drafts(self, load: _Load, num_tokens: int, step_s: float) -> bool:
        """Return whether to measure drafts although none has come, because the wait is too long or costs too much.

        If the wait costs too much, its steps become the measurement; otherwise add this step to the wait.
        """
        waited = load.awaiting
        if waited.steps >= _TRIAL_STEPS // 2 and waited.value < _HOPELESS * load.plain.value:
            load.drafted, load.steps, load.awaiting = waited, waited.steps, _Rate()  # that was trial enough
            return True
        waited.observe(num_tokens, step_s)
        return self._since_change > _MAX_SETTLE_STEPS

    def _decide(self, load: _Load) -> None:
        if load.is_measuring:
            if load.is_open:
                is_hopeless = load.steps >= _TRIAL_STEPS // 2 and not self._pays(load, _HOPELESS)
                if load.steps >= _TRIAL_STEPS or is_hopeless:
                    self._conclude(load)
            elif load.steps >= _PLAIN_STEPS:
                # Old measurements of drafts say nothing about the present; those that just ended do.
                if load.drafted.steps:
                    self._conclude(load)
                else:
                    self._turn(load, is_open=True, is_measuring=True)
        elif load.is_open:
            if load.steps >= load.open_steps or not self._pays(load, MARGIN):
                load.plain = _Rate()
                self._turn(load, is_open=False, is_measuring=True)
        elif load.steps >= load.closed_steps:
            self._turn(load, is_open=True, is_measuring=True)

    def _conclude(self, load: _Load) -> None:
        drafted, plain = load.drafted.value, load.plain.value
        is_open = self._pays(load, MARGIN)
        was_free = load.is_open and not self._has_seen_drafts and self._pays(load, 1 / MARGIN)
        self._turn(load, is_open=is_open, is_measuring=False)
        if is_open:
            if load.closed_steps > 2 * _CLOSED_STEPS:
                self._retry_soon()
            load.closed_steps = _CLOSED_STEPS
            load.open_steps = min(max(2 * load.open_steps, _FIRST_OPEN_STEPS), _OPEN_STEPS)
        else:
            load.open_steps = 0
            # A trial in which no draft came and no time was lost, as while the service is away, may soon be repeated.
            longer = min(max(2 * load.closed_steps, self._steps_to_regain(load)), _MAX_CLOSED_STEPS)
            load.closed_steps = _CLOSED_STEPS if was_free else longer
            load.drafted = _Rate()
        num_steps = load.open_steps if is_open else load.closed_steps
        self.decisions[load.max_rows] = Decision(load.max_rows, is_open, drafted, plain, num_steps)

    def _steps_to_regain(self, load: _Load) -> int:
        """Return after how many steps without drafts the time lost by measuring drafts is a small share of all time.

        The number is bounded, because the loss may be due to chance.
        """
        num_steps = _SETTLE_STEPS + min(load.drafted.steps, _TRIAL_STEPS)
        lost = num_steps * (load.plain.value / max(load.drafted.value, 1e-9) - 1)
        return int(min(lost / _MAX_LOST, 4 * _CLOSED_STEPS))

    def _retry_soon(self) -> None:
        """Let every load measure drafts again after at most 256 steps.

        Called when drafts have become faster at a load where they long were slower.
        """
        for load in self._loads.values():
            load.closed_steps = min(load.closed_steps, _CLOSED_STEPS)

    def _pays(self, load: _Load, margin: float) -> bool:
        return load.drafted.value >= margin * load.plain.value

    def _turn(self, load: _Load, is_open: bool, is_measuring: bool) -> None:
        load.is_open, load.is_measuring, load.steps = is_open, is_measuring, 0

    def _load(self, num_rows: int) -> _Load:
        """Return the load of steps with this many rows, a new one if needed; loads have 1, 2, 3-4, 5-8, ... rows."""
        key = max(num_rows - 1, 0).bit_length()
        if key not in self._loads:
            self._loads[key] = _Load(1 << key, _CLOSED_STEPS // 2)
        return self._loads[key]


class StepTimer:
    """Measures the time of steps that decode the same rows as the step before: only these can be compared."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last_s = clock()
        self._lengths: list[int] = []  # sorted

    def step_s(self, num_new: Sequence[int], lengths: Sequence[int]) -> float | None:
        """Return the time since the last call; None if rows came, left or were in prefill. Call it after every step.

        `num_new`: new tokens of each row, 0 in prefill; `lengths`: lengths of the rows that have new tokens. The timer
        gets no ids of rows, and recognises rows by their lengths.
        """
        now_s = self._clock()
        elapsed_s, self._last_s = now_s - self._last_s, now_s
        is_same = False
        if all(num_new):
            is_same = sorted(length - new for length, new in zip(lengths, num_new, strict=True)) == self._lengths
        self._lengths = sorted(lengths)
        return elapsed_s if is_same else None
