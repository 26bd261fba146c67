"""The lines of `specbranch top`: each measure over the last interval, and since the start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specbranch.cli.reading import Reading
from specbranch.core.round import Stats


@dataclass(frozen=True, slots=True)
class Span:
    """What was counted in a time; `is_whole`: since the start, for which there are sums and no rates."""

    stats: Stats
    target_steps: int
    draft_steps: int
    draft_step_s: float
    seconds: float
    is_whole: bool = True

    def amount(self, count: float) -> float | None:
        """A count as a rate per second, or as it is."""
        return count if self.is_whole else _ratio(count, self.seconds)


@dataclass(frozen=True, slots=True)
class Measure:
    """One line: its name for machines and for people, its unit, and both its values; None is not known."""

    name: str
    label: str
    unit: str  # "": a count, which is a rate over the interval; "%": a share of one
    last: float | None
    total: float | None


def measures(now: Reading, earlier: Reading | None) -> list[Measure]:
    """All lines of a reading; without an earlier one nothing is known of the last interval."""
    total = _whole(now)
    last = _between(now, earlier) if earlier is not None else None
    lines = (*_VERDICTS, *(_ROWS if now.draft_steps is None else _STEPS), *_WAIT)
    return [
        Measure(line.name, line.label, line.unit, line.value(last) if last else None, line.value(total))
        for line in lines
    ]


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _whole(reading: Reading) -> Span:
    return Span(
        reading.stats,
        reading.target_steps,
        reading.draft_steps or 0,
        reading.draft_step_s or 0.0,
        reading.uptime_s or 0.0,
    )


def _between(now: Reading, earlier: Reading) -> Span:
    return Span(
        now.stats.since(earlier.stats),
        now.target_steps - earlier.target_steps,
        (now.draft_steps or 0) - (earlier.draft_steps or 0),
        (now.draft_step_s or 0.0) - (earlier.draft_step_s or 0.0),
        now.at_s - earlier.at_s,
        is_whole=False,
    )


def _hit_rate(span: Span) -> float | None:
    return _ratio(span.stats.hits, span.stats.rounds)


def _tokens(span: Span) -> float | None:
    """With the target's own token."""
    return 1.0 + span.stats.accepted_per_round if span.stats.rounds else None


def _accepted(span: Span) -> float | None:
    return _ratio(span.stats.accepted, span.stats.submitted)


def _wait_ms(span: Span) -> float | None:
    return _ratio(1000.0 * span.stats.wait_s, span.target_steps)


def _rows(span: Span) -> float | None:
    return _ratio(span.stats.rows, span.draft_steps)


def _busy(span: Span) -> float | None:
    return _ratio(span.draft_step_s, span.seconds)


def _step_ms(span: Span) -> float | None:
    return _ratio(1000.0 * span.draft_step_s, span.draft_steps)


@dataclass(frozen=True, slots=True)
class _Line:
    name: str
    label: str
    unit: str
    value: Callable[[Span], float | None]


_VERDICTS = (
    _Line("verdicts", "verdicts", "", lambda span: span.amount(span.stats.rounds)),
    _Line("hit_rate", "hit rate", "%", _hit_rate),
    _Line("tokens_per_round", "tokens a round", "tokens", _tokens),
    _Line("accepted_share", "accepted of submitted", "%", _accepted),
    _Line("rejected", "rolled back: rejected", "", lambda span: span.amount(span.stats.rejected)),
    _Line("unused", "rolled back: unused", "", lambda span: span.amount(span.stats.unused)),
    _Line("cut", "rolled back: cut", "", lambda span: span.amount(span.stats.cut)),
)
_STEPS = (
    _Line("draft_steps", "draft steps", "", lambda span: span.amount(span.draft_steps)),
    _Line("rows_per_step", "rows of a draft step", "rows", _rows),
    _Line("draft_step_ms", "time of a draft step", "ms", _step_ms),
    _Line("busy", "busy with draft steps", "%", _busy),
)
_ROWS = (_Line("draft_rows", "draft rows", "", lambda span: span.amount(span.stats.rows)),)
_WAIT = (_Line("wait_ms", "wait of a target's step", "ms", _wait_ms),)
