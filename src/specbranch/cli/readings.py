"""Read the counters of a draft service or a vLLM server, and compute the figures that `specbranch top` shows."""

from __future__ import annotations

import contextlib
import http.client
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import typer
from rich.console import Console
from rich.markup import escape

from specbranch.cli.console import print_json
from specbranch.core.round import Stats
from specbranch.core.tree import CAUSES
from specbranch.errors import SpecBranchError, UsageError
from specbranch.launch.draft_process import explain_no_reply
from specbranch.service.client.interface import client_keys
from specbranch.service.client.stats import MetricSample, ServiceStatus, StatsClient, parse_metrics_text
from specbranch.service.wire.messages import PREFIX, REASONS, Overview

_OF_VLLM = "specbranch_"
_OWN_LABELS = ("cause", "reason")  # their values are kept apart; samples are summed over all other labels
_ANSWER_S = 1.0
_MAX_BYTES = 1 << 24  # of a metrics page
_HINT = (
    "start one by `specbranch draft MODEL`, or name its ADDRESS; the draft of `specbranch serve` is seen through its "
    "server, by `specbranch top http://HOST:PORT`"
)


@dataclass(frozen=True, slots=True)
class GateSpeeds:
    """Tokens per second that the gate measured at one load, with drafts and without."""

    drafts: float
    plain: float

    @property
    def ratio(self) -> float:
        """How many times as fast the server decodes with drafts."""
        return self.drafts / self.plain


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsReading:
    """The report of a draft service or vLLM server at one moment: counters since its start, and current values.

    The counters are `stats`, `*_steps`, `draft_step_s`, `undrafted` (sequences that got no drafts) and `faults` (errors
    inside SpecBranch). `stats.wait_s` is the time that targets waited for drafts, and `target_steps` counts the steps
    of targets that asked for drafts, of which `late_steps` got none in time and `unreachable_steps` reached no service.
    `stats.submitted` counts tokens of the draft model, and `text_tokens` those of drafts from the text. A draft step
    takes `first_row_s` with one row, and `more_row_s` more for each further row. None means not reported.
    """

    at_s: float
    model: str  # name of the draft or, from vLLM, of the target
    stats: Stats
    target_steps: int
    late_steps: int = 0
    unreachable_steps: int = 0
    text_tokens: int = 0
    draft_steps: int | None = None
    draft_step_s: float | None = None
    undrafted: int = 0
    faults: int = 0
    sessions: int = 0
    active_sessions: int | None = None
    waiting_rows: int | None = None
    is_draining: bool = False
    session_tokens: int | None = None
    targets: int | None = None
    first_row_s: float | None = None
    more_row_s: float | None = None
    memory_bytes: int | None = None
    uptime_s: float | None = None
    states: Sequence[str] = ()  # of the engines of a vLLM server
    gate: Mapping[str, bool] = field(default_factory=dict)  # by rows in a step: whether all engines draft
    speeds: Mapping[str, GateSpeeds] = field(default_factory=dict)  # by rows: of the engine that gains least

    def follows(self, earlier: StatsReading) -> bool:
        """Return whether this reading continues the earlier one: no counter has fallen, as all do in a new process."""
        grown = self.stats.since(earlier.stats)
        pairs = [(self.target_steps, earlier.target_steps), (self.draft_steps or 0, earlier.draft_steps or 0)]
        counts = (grown.rounds, grown.hits, grown.submitted, grown.accepted, grown.rows, grown.rolled_back)
        return min(counts) >= 0 and all(now >= before for now, before in pairs)


def from_overview(overview: Overview, at_s: float) -> StatsReading:
    """Convert a draft service's reply, received at time `at_s`, to a reading."""
    return _of_service(overview.figures, printable(overview.settings.get("model", "")), at_s)


def from_metrics(samples: Iterable[MetricSample], at_s: float) -> StatsReading | None:
    """Convert the samples of a metrics page, read at time `at_s`, to a reading; None if it has none of our metrics.

    The page is vLLM's or that of a draft service.
    """
    ours = [sample for sample in samples if sample.name.startswith(_OF_VLLM) and 0 <= sample.value < math.inf]
    if any(sample.name.startswith(f"{_OF_VLLM}state") for sample in ours):
        return _of_vllm(ours, at_s)
    figures = _sums(ours, PREFIX)
    return _of_service(figures, "", at_s) if "uptime_seconds" in figures else None


def printable(text: object) -> str:
    """Return another program's text without unprintable characters, so that it cannot control the terminal."""
    return "".join(letter for letter in str(text) if letter.isprintable())


def _of_service(figures: Mapping[str, float], model: str, at_s: float) -> StatsReading:
    return StatsReading(
        at_s=at_s,
        model=model,
        stats=_stats(figures, rows="rows", submitted="submitted_tokens"),
        target_steps=_count(figures, "target_steps"),
        draft_steps=_count(figures, "steps"),
        draft_step_s=figures.get("step_seconds"),
        undrafted=_undrafted(figures),
        faults=_count(figures, "faults"),
        sessions=_count(figures, "sessions"),
        active_sessions=_count(figures, "active_sessions"),
        waiting_rows=_count(figures, "waiting_rows"),
        is_draining=_count(figures, "draining") > 0,
        session_tokens=_count(figures, "session_tokens"),
        targets=_count(figures, "targets"),
        first_row_s=figures.get("first_row_seconds"),
        more_row_s=figures.get("more_row_seconds"),
        memory_bytes=_count(figures, "memory_bytes") or None,
        uptime_s=figures.get("uptime_seconds"),
    )


def _of_vllm(samples: Sequence[MetricSample], at_s: float) -> StatsReading:
    figures = _sums(samples, _OF_VLLM)
    models = sorted({printable(sample.labels.get("model_name", "")) for sample in samples})
    states = {
        printable(sample.labels.get("engine", "")): sample.labels.get("state", "")
        for sample in samples
        if sample.name == f"{_OF_VLLM}state" and sample.value
    }
    gate: dict[str, bool] = {}
    for sample in samples:
        if sample.name == f"{_OF_VLLM}gate_open":
            rows = printable(sample.labels.get("rows", ""))
            gate[rows] = gate.get(rows, True) and sample.value > 0
    cost = {sample.name.removeprefix(_OF_VLLM): sample.value for sample in samples}
    stats = _stats(figures, rows="draft_rows", submitted="submitted_tokens_sum")
    text_tokens = _count(figures, "text_tokens")
    return StatsReading(
        at_s=at_s,
        model=", ".join(models),
        stats=replace(stats, submitted=max(stats.submitted - text_tokens, 0)),
        target_steps=_count(figures, "calls"),
        late_steps=_count(figures, "timeouts") + _count(figures, "not_waited"),
        unreachable_steps=_count(figures, "unreachable"),
        text_tokens=text_tokens,
        undrafted=_undrafted(figures),
        faults=_count(figures, "faults"),
        sessions=_count(figures, "sessions"),
        first_row_s=cost.get("draft_first_row_seconds"),
        more_row_s=cost.get("draft_more_row_seconds"),
        states=[printable(states[engine]) for engine in sorted(states)],
        gate=gate,
        speeds=_speeds(samples),
    )


def _speeds(samples: Iterable[MetricSample]) -> dict[str, GateSpeeds]:
    """Return what the gates of all engines measured, by rows in a step; of several engines, the one that gains least.

    The gate of that engine is open only if the gates of all are.
    """
    measured: dict[tuple[str, str], dict[str, float]] = {}
    for sample in samples:
        if sample.name == f"{_OF_VLLM}gate_tokens_per_second":
            rows, engine = printable(sample.labels.get("rows", "")), sample.labels.get("engine", "")
            measured.setdefault((rows, engine), {})[sample.labels.get("way", "")] = sample.value
    speeds: dict[str, GateSpeeds] = {}
    for (rows, _), ways in measured.items():
        if ways.get("plain") and "drafts" in ways:
            found = GateSpeeds(ways["drafts"], ways["plain"])
            speeds[rows] = min(found, speeds.get(rows, found), key=lambda one: one.ratio)
    return speeds


def _stats(figures: Mapping[str, float], rows: str, submitted: str) -> Stats:
    return Stats(
        rounds=_count(figures, "hits") + _count(figures, "misses"),
        hits=_count(figures, "hits"),
        submitted=_count(figures, submitted),
        accepted=_count(figures, "accepted_tokens"),
        rows=_count(figures, rows),
        wait_s=figures.get("wait_seconds", 0.0),
        **{cause: _count(figures, f"rolled_back_tokens/{cause}") for cause in CAUSES},
    )


def _undrafted(figures: Mapping[str, float]) -> int:
    return sum(_count(figures, f"undrafted/{reason}") for reason in REASONS)


def _count(figures: Mapping[str, float], name: str) -> int:
    return round(figures.get(name, 0))


def _sums(samples: Iterable[MetricSample], prefix: str) -> dict[str, float]:
    """Return the metrics whose names begin with `prefix`, summed over engines, by the rest of their names.

    The value of a cause or reason label is added to the name, as in `rolled_back_tokens/cut`.
    """
    sums: dict[str, float] = {}
    for sample in samples:
        if sample.name.startswith(prefix):
            label = next((f"/{sample.labels[own]}" for own in _OWN_LABELS if own in sample.labels), "")
            name = sample.name.removeprefix(prefix).removesuffix("_total") + label
            sums[name] = sums.get(name, 0.0) + sample.value
    return sums


@dataclass(frozen=True, slots=True)
class ReadingSpan:
    """The growth of a source's counters in a time span of `seconds`.

    `is_whole`: the span began with the start of the source, so sums are shown instead of rates.
    """

    stats: Stats
    target_steps: int
    draft_steps: int
    draft_step_s: float
    seconds: float
    is_whole: bool = True

    def amount(self, count: float) -> float | None:
        """Return a count as it is if the span is whole, else as a rate per second; None if the span has no length."""
        return count if self.is_whole else _ratio(count, self.seconds)


@dataclass(frozen=True, slots=True)
class Measure:
    """One line of `specbranch top`: its name for programs, its label for people, its unit, and its values.

    The values are those of the last interval (`last`) and since the start (`total`); None means unknown.
    """

    name: str
    label: str
    unit: str  # "": a count, shown as a rate for the last interval; "%": a share of one
    last: float | None
    total: float | None


def count(number: int, thing: str) -> str:
    """Return a number with its noun, in the singular or plural."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def top_rows(now: StatsReading, earlier: StatsReading | None) -> list[Measure]:
    """Return the lines of `specbranch top` for `now`; without an `earlier` reading, `Measure.last` is None in each."""
    total = _whole(now)
    last = _between(now, earlier) if earlier is not None else None
    lines = (*_VERDICTS, *(_ROWS if now.draft_steps is None else _STEPS), *_WAIT)
    return [
        Measure(line.name, line.label, line.unit, line.value(last) if last else None, line.value(total))
        for line in lines
    ]


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _whole(reading: StatsReading) -> ReadingSpan:
    return ReadingSpan(
        reading.stats,
        reading.target_steps,
        reading.draft_steps or 0,
        reading.draft_step_s or 0.0,
        reading.uptime_s or 0.0,
    )


def _between(now: StatsReading, earlier: StatsReading) -> ReadingSpan:
    return ReadingSpan(
        now.stats.since(earlier.stats),
        now.target_steps - earlier.target_steps,
        (now.draft_steps or 0) - (earlier.draft_steps or 0),
        (now.draft_step_s or 0.0) - (earlier.draft_step_s or 0.0),
        now.at_s - earlier.at_s,
        is_whole=False,
    )


def _tokens(span: ReadingSpan) -> float | None:
    """Return the mean number of tokens per verdict, the target's own token included; None without verdicts."""
    return 1.0 + span.stats.accepted_per_round if span.stats.rounds else None


@dataclass(frozen=True, slots=True)
class _TopRow:
    name: str
    label: str
    unit: str
    value: Callable[[ReadingSpan], float | None]


_VERDICTS = (
    _TopRow("verdicts", "verification results", "", lambda span: span.amount(span.stats.rounds)),
    _TopRow("hit_rate", "prepared", "%", lambda span: _ratio(span.stats.hits, span.stats.rounds)),
    _TopRow("tokens_per_round", "mean acceptance length", "tokens", _tokens),
    _TopRow("accepted_share", "acceptance rate", "%", lambda span: _ratio(span.stats.accepted, span.stats.submitted)),
    _TopRow("rejected", "discarded: rejected", "", lambda span: span.amount(span.stats.rejected)),
    _TopRow("unused", "discarded: unused", "", lambda span: span.amount(span.stats.unused)),
    _TopRow("cut", "discarded: cut", "", lambda span: span.amount(span.stats.cut)),
)
_STEPS = (
    _TopRow("draft_steps", "draft steps", "", lambda span: span.amount(span.draft_steps)),
    _TopRow("rows_per_step", "rows of a draft step", "rows", lambda span: _ratio(span.stats.rows, span.draft_steps)),
    _TopRow(
        "draft_step_ms", "time of a draft step", "ms", lambda span: _ratio(1000.0 * span.draft_step_s, span.draft_steps)
    ),
    _TopRow("busy", "busy with draft steps", "%", lambda span: _ratio(span.draft_step_s, span.seconds)),
)
_ROWS = (_TopRow("draft_rows", "draft rows", "", lambda span: span.amount(span.stats.rows)),)
_WAIT = (
    _TopRow(
        "wait_ms", "wait of a target's step", "ms", lambda span: _ratio(1000.0 * span.stats.wait_s, span.target_steps)
    ),
)


class ServiceUnavailable(SpecBranchError, RuntimeError):
    """A source of counters cannot be read now; the message says why. A later attempt may succeed."""


@contextlib.contextmanager
def exit_if_unavailable(address: str, as_json: bool) -> Iterator[None]:
    """Turn `ServiceUnavailable` in this context into a printed cause and remedy, and exit code 1.

    With `as_json`, also print the cause as JSON.
    """
    try:
        yield
    except ServiceUnavailable as outage:
        hint = f"; {_HINT}" if str(outage).startswith("nobody") else ""
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(outage))}{hint}", highlight=False, soft_wrap=True)
        if as_json:
            print_json({"address": address, "answers": False, "cause": str(outage)})
        raise typer.Exit(1) from outage


class StatsSource(Protocol):
    """Interface of a source of counters: a draft service or a metrics page; `name` is shown to the user."""

    name: str

    def read(self) -> StatsReading:
        """Read the counters now, and return the reading; raise `ServiceUnavailable` if the source cannot be read."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


def open_source(address: str, keys: Path | None) -> StatsSource:
    """Return the source for an address: a metrics page for an HTTP URL, else a draft service.

    `keys` is the directory of the client's CURVE keys. Raise `UsageError` if it is given for a metrics page.
    """
    if address.startswith(("http://", "https://")):
        if keys is not None:
            raise UsageError("--keys belongs to a draft service at tcp://HOST:PORT, not to a server's metrics")
        return PageSource(address)
    return ServiceSource(address, keys)


class ServiceSource:
    """A draft service as a source of counters, which are read by the service's own protocol."""

    def __init__(self, address: str, keys: Path | None) -> None:
        self.name = f"draft service at {address}"
        self._address = address
        self._keys = keys
        self._stats_client = StatsClient(address, None, client_keys(str(keys) if keys else None))

    def read(self) -> StatsReading:
        return from_overview(self.overview(), time.monotonic())

    def overview(self) -> Overview:
        """Ask the service for its figures and settings, and return them; raise `ServiceUnavailable` without a reply.

        Raise `UsageError` if the service is too old to report its figures.
        """
        reach = self._stats_client.poll(_ANSWER_S)
        if self._stats_client.refusal is not None:
            raise UsageError(
                f"the draft service at {self._address} has an older version that reports no counters; update it"
            )
        if reach is ServiceStatus.ABSENT:
            raise ServiceUnavailable(
                explain_no_reply(self._address, self._keys) or f"nobody listens at {self._address}"
            )
        overview = self._stats_client.overview
        if reach is not ServiceStatus.ANSWERS or overview is None:
            raise ServiceUnavailable(f"the draft service at {self._address} does not answer")
        return overview

    def close(self) -> None:
        self._stats_client.close()


class PageSource:
    """A page of Prometheus metrics: vLLM's, or that of a draft service with --metrics-port."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/").removesuffix("/metrics")
        self.name = f"server at {self._url}"

    def read(self) -> StatsReading:
        reading = from_metrics(parse_metrics_text(self._text()), time.monotonic())
        if reading is None:
            raise ServiceUnavailable(
                f"{self._url}/metrics has no metrics of specbranch: the server runs without our proposer"
            )
        self.name = f"{'vLLM' if reading.uptime_s is None else 'draft service'} at {self._url}"
        return reading

    def _text(self) -> str:
        try:
            with urllib.request.urlopen(f"{self._url}/metrics", timeout=_ANSWER_S) as page:
                return str(page.read(_MAX_BYTES).decode(errors="replace"))
        except urllib.error.HTTPError as error:
            error.close()
            raise ServiceUnavailable(
                f"{self._url}/metrics answers with {error.code} {printable(error.reason)}"
            ) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServiceUnavailable(
                f"no answer from {self._url}: {printable(getattr(error, 'reason', error))}"
            ) from error

    def close(self) -> None:
        pass
