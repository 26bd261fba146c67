"""The service's counters by name, and its Prometheus endpoint."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specbranch.core.costs import StepCost
from specbranch.core.tree import CAUSES
from specbranch.machine import process_memory
from specbranch.service.server.draft_runner import DraftRunner
from specbranch.service.server.lookup import LookupCounts
from specbranch.service.server.store import FaultGuard, SessionStore
from specbranch.service.wire.messages import PREFIX

_FRESH_S = 1.0


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric: its name, its meaning, and its values by the value of `label`; without a label there is one, of ""."""

    name: str
    text: str
    values: Mapping[str, float]
    is_counter: bool
    label: str = ""


class ServiceMetrics:
    """Collected when they are asked for, once a second at most, from what is counted anyway. Any thread may ask."""

    def __init__(
        self,
        store: SessionStore,
        runner: DraftRunner,
        lookup: LookupCounts,
        faults: FaultGuard,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._runner = runner
        self._lookup = lookup
        self._faults = faults
        self._clock = clock
        self._start_s = clock()
        self._lock = threading.Lock()
        self._collected: tuple[float, list[Metric]] | None = None

    def as_dict(self) -> dict[str, float]:
        """All values; those with a label are named name/label."""
        return {
            f"{family.name}/{label}" if label else family.name: float(value)
            for family in self.families()
            for label, value in family.values.items()
        }

    def families(self) -> list[Metric]:
        """All metrics."""
        with self._lock:
            now_s = self._clock()
            if self._collected is None or now_s - self._collected[0] >= _FRESH_S:
                self._collected = (now_s, self._collect())
            return self._collected[1]

    def _collect(self) -> list[Metric]:
        stats = self._store.stats()
        lookup, runner = self._lookup, self._runner.counts
        faults = self._faults.count + self._runner.faults.count
        return [
            _counter("hits", "Verdicts whose root had been drawn and run.", stats.hits),
            _counter("misses", "Verdicts that were not prepared.", stats.rounds - stats.hits),
            _counter("submitted_tokens", "Tokens proposed for verification.", stats.submitted),
            _counter("accepted_tokens", "Proposed tokens that the target accepted.", stats.accepted),
            Metric(
                "rolled_back_tokens",
                "Drafted tokens that a verdict made useless.",
                {cause: getattr(stats, cause) for cause in CAUSES},
                is_counter=True,
                label="cause",
            ),
            _counter("rows", "Draft rows run.", runner.rows),
            _counter("steps", "Draft steps run.", runner.steps),
            _counter("step_seconds", "Time in draft steps.", runner.step_s),
            _counter("failed_steps", "Draft steps that the engine refused.", runner.failed_steps),
            _counter(
                "borrowed_tokens",
                "Tokens not prefilled because another session's cache held them.",
                runner.borrowed_tokens,
            ),
            _counter("target_steps", "Steps that targets told of.", lookup.steps),
            _counter("wait_seconds", "Time that answers were held back for a draft.", lookup.wait_s),
            _counter("overdue", "Answers given without a full draft because time was up.", lookup.overdue),
            _counter("lookups", "Sequences looked up.", lookup.lookups),
            _counter("unknown", "Lookups of a sequence that was not known.", lookup.unknown),
            _counter("opened", "Sequences opened.", lookup.opened),
            _counter("hints", "Verdicts that came with what the target foresees.", lookup.hints),
            _counter("refused_frames", "Messages that were refused.", lookup.refused),
            _counter("dropped_frames", "Messages dropped because their client had too many waiting.", lookup.dropped),
            _counter("faults", "Exceptions that cost one session or one answer.", faults),
            _counter("evictions", "Sessions forgotten for want of room.", self._store.num_evictions),
            Metric(
                "undrafted",
                "Texts that were not drafted for, by reason.",
                {str(reason): count for reason, count in self._store.undrafted.counts().items()},
                is_counter=True,
                label="reason",
            ),
            *self._gauges(),
        ]

    def _gauges(self) -> list[Metric]:
        sessions = self._store.snapshot()
        num_active = self._store.num_active(self._clock())
        cost = self._runner.cost.cost or StepCost(0.0)
        return [
            _gauge("sessions", "Sessions remembered.", len(sessions)),
            _gauge("active_sessions", "Sessions whose target goes on with them.", num_active),
            _gauge("waiting_rows", "Rows that found no room in the last draft step.", self._runner.counts.waiting_rows),
            _gauge("draining", "1 if no new sequences are taken, otherwise 0.", self._store.is_draining),
            _gauge("session_tokens", "Tokens of sequence remembered.", self._store.num_tokens),
            _gauge("targets", "Namespaces that have sessions.", len({session.namespace for session in sessions})),
            _gauge("first_row_seconds", "Time of a draft step with one row.", cost.base_s),
            _gauge("more_row_seconds", "Time of each further row in a draft step.", cost.per_row_s),
            _gauge("memory_bytes", "Resident memory of the service, 0 if unknown.", process_memory() or 0),
            _gauge("uptime_seconds", "Time since the service began.", self._clock() - self._start_s),
        ]


def _counter(name: str, text: str, value: float) -> Metric:
    return Metric(name, text, {"": value}, is_counter=True)


def _gauge(name: str, text: str, value: float) -> Metric:
    return Metric(name, text, {"": value}, is_counter=False)


def serve_metrics(figures: ServiceMetrics, port: int, host: str = "127.0.0.1") -> Any:
    """Answer scrapes at a port; returns what must be shut down."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise ImportError("metrics need prometheus_client: pip install 'specbranch[metrics]'") from error
    registry = CollectorRegistry()
    registry.register(_Collector(figures))
    httpd, _ = start_http_server(port, addr=host, registry=registry)
    return httpd


class _Collector:
    def __init__(self, figures: ServiceMetrics) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for family in self._figures.families():
            kind = CounterMetricFamily if family.is_counter else GaugeMetricFamily
            metric = kind(PREFIX + family.name, family.text, labels=[family.label] if family.label else [])
            for label, value in family.values.items():
                metric.add_metric([label] if label else [], value)
            yield metric
