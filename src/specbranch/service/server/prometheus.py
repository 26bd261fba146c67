"""The service's counters and gauges: declared here, counted by the two threads, read by clients and by Prometheus."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from specbranch.core.costs import StepCost, StepTimeModel
from specbranch.core.round import Stats
from specbranch.core.tree import CAUSES
from specbranch.machine import process_memory
from specbranch.service.server.store import FaultGuard, SessionStore
from specbranch.service.wire.messages import PREFIX, Overview, OverviewRequest, StatsReply, StatsRequest

_MAX_AGE_S = 1.0  # of collected metrics
_STATS_IN_REPLY = [one.name for one in fields(Stats) if one.name in StatsReply.__struct_fields__]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric: its name, its meaning (`text`), and its values.

    The keys of `values` are the values of the label; a metric without a label has one value, with an empty key.
    """

    name: str
    text: str
    values: Mapping[str, float]
    is_counter: bool
    label: str = ""


def _declare(name: str, text: str, *, is_counter: bool = True) -> Any:
    """Return a dataclass field that starts at 0 and is shown as a metric with this name and description."""
    return field(default=0, metadata={"metric": (name, text, is_counter)})


@dataclass(slots=True, kw_only=True)
class LookupCounts:
    """The counters of the lookup thread, which serves the clients."""

    steps: int = _declare("target_steps", "Steps that targets sent.")
    wait_s: float = _declare("wait_seconds", "Time that answers were held back for a draft.")
    overdue: int = _declare("overdue", "Answers given without a full draft because time was up.")
    lookups: int = _declare("lookups", "Sequences looked up.")
    unknown: int = _declare("unknown", "Lookups of a sequence that was not known.")
    opened: int = _declare("opened", "Sequences opened.")
    hints: int = _declare("hints", "Verdicts that came with a hint of the target about the next one.")
    refused: int = _declare("refused_frames", "Messages that were refused.")
    dropped: int = _declare("dropped_frames", "Messages dropped because their client had too many waiting.")


@dataclass(slots=True, kw_only=True)
class DraftRunnerCounts:
    """The counters of the draft thread, which runs the draft model."""

    rows: int = _declare("rows", "Draft rows run.")
    steps: int = _declare("steps", "Draft steps run.")
    step_s: float = _declare("step_seconds", "Time in draft steps.")
    failed_steps: int = _declare("failed_steps", "Draft steps that the engine refused.")
    borrowed_tokens: int = _declare(
        "borrowed_tokens", "Tokens not prefilled because another session's cache held them."
    )
    waiting_rows: int = _declare("waiting_rows", "Rows that found no room in the last draft step.", is_counter=False)
    cleared: int = 0  # idle sessions that lost their part of the cache to others


class ServiceMetrics:
    """Collects all metrics when they are read, at most once a second. Any thread may use it.

    `counts` are the counters of the threads, `faults` has the `FaultGuard` of each thread, and `draft_cost` is the
    measured time of draft steps. `settings` are those that the service was started with.
    """

    def __init__(
        self,
        store: SessionStore,
        counts: Sequence[LookupCounts | DraftRunnerCounts],
        faults: Sequence[FaultGuard],
        draft_cost: StepTimeModel,
        settings: Mapping[str, str | int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._counts = counts
        self._faults = faults
        self._draft_cost = draft_cost
        self._settings = dict(settings)
        self._clock = clock
        self._start_s = clock()
        self._lock = threading.Lock()
        self._collected: tuple[float, list[Metric]] | None = None

    def stats_reply(self, request: StatsRequest) -> StatsReply:
        """Return the reply to a request for the counters of one namespace."""
        sessions, stats = self._store.stats_of(request.namespace)
        cost = self._draft_cost.cost or StepCost(0.0)
        return StatsReply(
            round=request.round,
            sessions=sessions,
            first_row_us=round(1e6 * cost.base_s),
            more_row_us=round(1e6 * cost.per_row_s),
            **{name: getattr(stats, name) for name in _STATS_IN_REPLY},
            **self._store.undrafted.counts(request.namespace),
        )

    def overview(self, request: OverviewRequest) -> Overview:
        """Return the reply to a request for the settings of the service and all its metrics."""
        return Overview(request.round, self._settings, self.as_dict())

    def as_dict(self) -> dict[str, float]:
        """Return the values of all metrics by name; a metric with a label has an entry "name/value" per label value."""
        return {
            f"{family.name}/{label}" if label else family.name: float(value)
            for family in self.families()
            for label, value in family.values.items()
        }

    def families(self) -> list[Metric]:
        """Return all metrics; collect them again if the last collection is more than a second ago."""
        with self._lock:
            now_s = self._clock()
            if self._collected is None or now_s - self._collected[0] >= _MAX_AGE_S:
                self._collected = (now_s, [*self._counters(), *self._gauges()])
            return self._collected[1]

    def _counters(self) -> Iterator[Metric]:
        stats = self._store.stats()
        yield _counter("hits", "Verdicts whose root had been drafted and run.", stats.hits)
        yield _counter("misses", "Verdicts that were not prepared.", stats.rounds - stats.hits)
        yield _counter("submitted_tokens", "Tokens proposed for verification.", stats.submitted)
        yield _counter("accepted_tokens", "Proposed tokens that the target accepted.", stats.accepted)
        by_cause = {cause: getattr(stats, cause) for cause in CAUSES}
        yield Metric("rolled_back_tokens", "Drafted tokens that a verdict made useless.", by_cause, True, "cause")
        for counts in self._counts:
            for one in fields(counts):
                if "metric" in one.metadata:
                    name, text, is_counter = one.metadata["metric"]
                    yield Metric(name, text, {"": getattr(counts, one.name)}, is_counter)
        num_faults = sum(faults.count for faults in self._faults)
        yield _counter("faults", "Exceptions that cost one session or one answer.", num_faults)
        yield _counter("evictions", "Sessions evicted for lack of room.", self._store.num_evictions)
        undrafted = {str(reason): count for reason, count in self._store.undrafted.counts().items()}
        yield Metric("undrafted", "Sequences that got no drafts, by reason.", undrafted, True, "reason")

    def _gauges(self) -> Iterator[Metric]:
        sessions = self._store.snapshot()
        num_active = self._store.num_active(self._clock())
        cost = self._draft_cost.cost or StepCost(0.0)
        yield _gauge("sessions", "Sessions in the store.", len(sessions))
        yield _gauge("active_sessions", "Sessions that are being decoded.", num_active)
        yield _gauge("draining", "1 if no new sequences are accepted, otherwise 0.", self._store.is_draining)
        yield _gauge("session_tokens", "Tokens of all sessions.", self._store.num_tokens)
        yield _gauge("targets", "Namespaces that have sessions.", len({session.namespace for session in sessions}))
        yield _gauge("first_row_seconds", "Time of a draft step with one row.", cost.base_s)
        yield _gauge("more_row_seconds", "Time of each further row in a draft step.", cost.per_row_s)
        yield _gauge("memory_bytes", "Resident memory of the service, 0 if unknown.", process_memory() or 0)
        yield _gauge("uptime_seconds", "Time since the service began.", self._clock() - self._start_s)


def _counter(name: str, text: str, value: float) -> Metric:
    return Metric(name, text, {"": value}, is_counter=True)


def _gauge(name: str, text: str, value: float) -> Metric:
    return Metric(name, text, {"": value}, is_counter=False)


def serve_metrics(metrics: ServiceMetrics, host: str, port: int) -> Any:
    """Start an HTTP server that answers Prometheus scrapes, and return it; the caller shuts it down."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise ImportError("metrics need prometheus_client: pip install 'specbranch[metrics]'") from error
    registry = CollectorRegistry()
    registry.register(_Collector(metrics))
    httpd, _ = start_http_server(port, addr=host, registry=registry)
    return httpd


class _Collector:
    def __init__(self, metrics: ServiceMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for family in self._metrics.families():
            kind = CounterMetricFamily if family.is_counter else GaugeMetricFamily
            metric = kind(PREFIX + family.name, family.text, labels=[family.label] if family.label else [])
            for label, value in family.values.items():
                metric.add_metric([label] if label else [], value)
            yield metric
