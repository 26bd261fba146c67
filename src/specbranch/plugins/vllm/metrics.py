"""Export our metrics on vLLM's own endpoint, even if another process serves it.

The proposer writes its counters to a stats file; only the draft service knows hits and rolled-back tokens. All these
counters are collected in vLLM and not by the draft service, because metrics matter most while the service is dead, and
because users then need no second scrape target. The price is a stats file and this collector.

With several API servers, vLLM serves only what the Prometheus client keeps in files that all its processes share, and
calls no collector. So one process copies new counts to these files every second; a second process that did the same
would double the counts, because the files are summed.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from specbranch.core.tree import CAUSES
from specbranch.plugins.vllm.stats_file import PublishedStats, read_stats_files
from specbranch.service.client.interface import client_keys
from specbranch.service.client.stats import ServiceStatus, StatsClient
from specbranch.service.wire.addresses import normalize_addresses
from specbranch.service.wire.messages import REASONS, StatsReply

log = logging.getLogger(__name__)

STATES = ("on", "closed", "lagging", "vocabulary", "unreachable", "text", "off")
_TIMEOUT_S = 0.04  # for the replies of all services together
_LABELS = ["model_name", "engine"]
_COUNTS = {
    "calls": ("calls", "Engine steps in which the proposer called the draft service."),
    "answered": ("answered", "Calls that the draft service answered before the deadline."),
    "timeouts": ("timeouts", "Calls that the draft service did not answer before the deadline."),
    "unreachable": ("unreachable", "Calls for which no draft service could be reached."),
    "not_waited": ("not_waited", "Calls that did not wait for an answer, because the draft service was lagging."),
    "prefetched": ("prefetched", "Rows whose draft was there before they asked for it."),
    "sampled": (
        "sampled",
        "Draft tokens sampled from the draft's distribution, to be tested against their probabilities.",
    ),
    "opened": ("opened", "Sequences sent to the draft service in full, because it did not know them."),
    "rerouted": ("rerouted", "Sequences that went on at another draft service, because theirs failed."),
    "refused": ("refused", "Messages refused by the proposer or by the draft service."),
    "unknown_token": ("unknown_token", "Drafts cut at a token that is not in the target's vocabulary."),
    "other_vocab": (
        "other_vocabulary",
        "Calls without drafts, because the draft model has another vocabulary than the target.",
    ),
    "faults": ("faults", "Calls that failed by an error in specbranch itself."),
    "wait_s": ("wait_seconds", "Time that the target waited for drafts."),
    "text_drafts": ("text_drafts", "Drafts from the text, for rows to which the draft service gave none."),
    "text_tokens": ("text_tokens", "Tokens of drafts from the text."),
    "text_accepted": ("text_accepted_tokens", "Tokens of drafts from the text that the target accepted."),
    "text_faults": ("text_faults", "Drafts from the text that failed by an error in specbranch itself."),
}
_STATS: dict[str, tuple[str, Callable[[StatsReply], int]]] = {
    "hits": ("Verification results for which a draft branch was ready.", lambda stats: stats.hits),
    "misses": (
        "Verification results for which no draft branch was ready.",
        lambda stats: stats.rounds - stats.hits,
    ),
    "accepted_tokens": ("Draft tokens that the target accepted.", lambda stats: stats.accepted),
    "draft_rows": ("Rows that the draft model has run for this target.", lambda stats: stats.rows),
}
_GAUGES: dict[str, tuple[str, Callable[[StatsReply], float]]] = {
    "sessions": ("Sequences that the draft service keeps for this target.", lambda stats: stats.sessions),
    "draft_first_row_seconds": ("Time of a draft step with one row.", lambda stats: stats.first_row_us / 1e6),
    "draft_more_row_seconds": ("Time of each further row in a draft step.", lambda stats: stats.more_row_us / 1e6),
}


_REACHES = list(ServiceStatus)  # best first
# Engines that share a namespace, the clients of their services, and the best status of these services.
_Group = tuple[list[PublishedStats], list[StatsClient], ServiceStatus]
_PERIOD_S = 1.0


class Collector:
    """Collects the counters of a vLLM run's proposers and of their draft services, for Prometheus.

    It never raises and never waits longer than `timeout_s`. `run` is the name of the run (`stats_file.begin_run`).
    """

    def __init__(self, run: str, timeout_s: float = _TIMEOUT_S) -> None:
        self._run = run
        self._timeout_s = timeout_s
        self._stats_clients: dict[tuple[str, bytes, str], StatsClient] = {}
        self._lock = threading.Lock()

    def describe(self) -> list[Any]:
        """Return no metrics: none are known before a proposer runs."""
        return []

    def collect(self) -> list[Any]:
        """Ask the draft services for their counters, and return all metrics; [] without a proposer, or on failure."""
        with self._lock:
            try:
                stats_files = list(read_stats_files(self._run))
                return [family for family in self._families(stats_files) if family.samples] if stats_files else []
            except Exception:
                log.warning(
                    "specbranch's metrics are missing in this scrape: they could not be collected", exc_info=True
                )
                return []

    def close(self) -> None:
        """Close all connections to draft services."""
        with self._lock:
            self._close_all_but([])

    def _families(self, stats_files: Sequence[PublishedStats]) -> Iterator[Any]:
        groups = self._ask(stats_files)
        yield self._states(groups)
        yield from _gates(stats_files)
        yield from _of_proposers(stats_files)
        yield from _of_services([(group, _total(stats_clients)) for group, stats_clients, _ in groups])

    def _ask(self, stats_files: Sequence[PublishedStats]) -> list[_Group]:
        """Poll the services of all engines within `timeout_s` together; return one group for each set of services.

        A group has its engines' stats, the clients of its services and their best status. Close the connections to
        services that no engine uses any more.
        """
        end_s = time.monotonic() + self._timeout_s
        asked: list[_Group] = []
        wanted: list[tuple[str, bytes, str]] = []
        for key, group in itertools.groupby(sorted(stats_files, key=_services_of), key=_services_of):
            addresses, namespace, keys = key
            own = [(address, namespace, keys) for address in addresses] if namespace else []
            stats_clients = [self._stats_client(*one) for one in own]
            reaches = [stats_client.poll(max(end_s - time.monotonic(), 0.0)) for stats_client in stats_clients]
            asked.append((list(group), stats_clients, min(reaches, key=_REACHES.index, default=ServiceStatus.ABSENT)))
            wanted += own
        self._close_all_but(wanted)
        return asked

    def _stats_client(self, address: str, namespace: bytes, keys: str) -> StatsClient:
        key = (address, namespace, keys)
        if key not in self._stats_clients:
            self._stats_clients[key] = StatsClient(address, namespace, client_keys(keys or None))
        return self._stats_clients[key]

    def _close_all_but(self, wanted: Sequence[tuple[str, bytes, str]]) -> None:
        """Close all connections but those with the keys `wanted`."""
        for key in [key for key in self._stats_clients if key not in wanted]:
            self._stats_clients.pop(key).close()

    def _states(self, groups: Sequence[_Group]) -> Any:
        from prometheus_client.core import GaugeMetricFamily

        family = GaugeMetricFamily(
            "specbranch_state", "1 for the current state of drafting, 0 for the others.", labels=[*_LABELS, "state"]
        )
        for group, stats_clients, reach in groups:
            for shown in group:
                now = state_of(shown, reach) if stats_clients else _state_alone(shown)
                for state in STATES:
                    family.add_metric([*_labels([shown]), state], float(state == now))
        return family


def state_of(shown: PublishedStats, reach: ServiceStatus) -> str:
    """Return the state of drafting, one of `STATES`, from a proposer's stats and the polled status of its service.

    While the service gives no drafts, n-gram drafts from the text continue; this is not a state of its own.
    """
    if reach is ServiceStatus.ABSENT:
        return "unreachable"
    if shown.vocab_mismatch:
        return "vocabulary"
    if shown.is_lagging or reach is ServiceStatus.SILENT:
        return "lagging"
    return "closed" if shown.is_closed else "on"


def _state_alone(shown: PublishedStats) -> str:
    """Return the state of drafting of a proposer that is connected to no service."""
    if shown.namespace and shown.services == []:
        return "unreachable"  # no service is known or connected yet
    return "text" if not shown.address and shown.counts else "off"


def _services_of(shown: PublishedStats) -> tuple[tuple[str, ...], bytes, str]:
    listed = shown.address if shown.services is None else shown.services
    addresses = normalize_addresses(listed) if listed else ()
    return (addresses, shown.namespace, shown.keys or "")


def _total(stats_clients: Sequence[StatsClient]) -> StatsReply | None:
    """Return the sum of these services' stats, with the times of the slowest; None if no stats are known."""
    known = [stats_client.stats for stats_client in stats_clients if stats_client.stats is not None]
    if len(known) < 2:
        return known[0] if known else None
    join = {
        name: max if name in ("round", "first_row_us", "more_row_us") else sum for name in known[0].__struct_fields__
    }
    return StatsReply(**{name: join[name](getattr(stats, name) for stats in known) for name in join})


def _labels(group: Sequence[PublishedStats]) -> list[str]:
    """Return the values of `_LABELS` for engines that share a namespace: the model's name, and all engine numbers.

    The service counts such engines together.
    """
    return [group[0].model, ",".join(str(shown.engine) for shown in sorted(group, key=lambda shown: shown.engine))]


def _gates(stats_files: Sequence[PublishedStats]) -> Iterator[Any]:
    from prometheus_client.core import GaugeMetricFamily

    is_open = GaugeMetricFamily(
        "specbranch_gate_open",
        "Whether the gate lets drafts through, by the number of requests in a step.",
        labels=[*_LABELS, "rows"],
    )
    speed = GaugeMetricFamily(
        "specbranch_gate_tokens_per_second",
        "What the gate measured when it decided, with drafts and without.",
        labels=[*_LABELS, "rows", "way"],
    )
    for shown in stats_files:
        for decision in sorted(shown.gate, key=lambda decision: decision.max_rows):
            labels = [*_labels([shown]), decision.rows]
            is_open.add_metric(labels, float(decision.is_open))
            speed.add_metric([*labels, "drafts"], decision.drafted)
            speed.add_metric([*labels, "plain"], decision.plain)
    yield is_open
    yield speed


def _of_proposers(stats_files: Sequence[PublishedStats]) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

    for key, (name, text) in _COUNTS.items():
        family = CounterMetricFamily(f"specbranch_{name}", text, labels=_LABELS)
        for shown in stats_files:
            family.add_metric(_labels([shown]), shown.counts.get(key, 0.0))
        yield family
    aside = CounterMetricFamily(
        "specbranch_aside_rows",
        "Rows without drafts: they use what the draft lacks, are sampled with a seed, or their request wants none.",
        labels=[*_LABELS, "cause"],
    )
    submitted = HistogramMetricFamily(
        "specbranch_submitted_tokens", "Draft tokens per row and step; 0 for a row without a draft.", labels=_LABELS
    )
    for shown in stats_files:
        for cause in ("lora", "multimodal", "seed", "request"):
            aside.add_metric([*_labels([shown]), cause], shown.asides.get(cause, 0))
        aside.add_metric([*_labels([shown]), "oversized"], shown.counts.get("oversized", 0.0))
        submitted.add_metric(_labels([shown]), *_buckets(shown.lens))
    yield aside
    yield submitted


def _buckets(lens: Sequence[int]) -> tuple[list[tuple[str, float]], float]:
    """Return cumulative counts by draft length, and the sum of all lengths; `lens[n]` rows have a draft of n tokens."""
    totals = list(itertools.accumulate(lens))
    bounds: list[tuple[str, float]] = [(f"{length}.0", float(total)) for length, total in enumerate(totals)]
    return [*bounds, ("+Inf", float(totals[-1]))], float(sum(length * rows for length, rows in enumerate(lens)))


def _of_services(known: Sequence[tuple[list[PublishedStats], StatsReply | None]]) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    answered = [(_labels(group), stats) for group, stats in known if stats is not None]
    for name, (text, value) in _STATS.items():
        family = CounterMetricFamily(f"specbranch_{name}", text, labels=_LABELS)
        for labels, stats in answered:
            family.add_metric(labels, value(stats))
        yield family
    rolled_back = CounterMetricFamily(
        "specbranch_rolled_back_tokens",
        "Drafted tokens that a verification result made useless.",
        labels=[*_LABELS, "cause"],
    )
    undrafted = CounterMetricFamily(
        "specbranch_undrafted", "Texts that the draft service did not draft for.", labels=[*_LABELS, "reason"]
    )
    for labels, stats in answered:
        for cause in CAUSES:
            rolled_back.add_metric([*labels, cause], getattr(stats, cause))
        for reason in REASONS:
            undrafted.add_metric([*labels, reason], getattr(stats, reason))
    yield rolled_back
    yield undrafted
    for name, (text, gauge) in _GAUGES.items():
        family = GaugeMetricFamily(f"specbranch_{name}", text, labels=_LABELS)
        for labels, stats in answered:
            family.add_metric(labels, gauge(stats))
        yield family


class MultiprocessExporter:
    """Copies a collector's metrics to the files that vLLM's API servers, if there are several, share and serve."""

    def __init__(self, collector: Collector) -> None:
        from prometheus_client import CollectorRegistry

        self._collector = collector
        self._registry = CollectorRegistry()  # not the default one, which is not served here
        self._metrics: dict[str, Any] = {}
        self._seen: dict[tuple[str, tuple[str, ...]], float] = {}

    def start(self) -> None:
        """Start a thread that calls `refresh` every second, until the process ends or a call fails."""
        threading.Thread(target=self._run, name="specbranch-metrics", daemon=True).start()

    def refresh(self) -> None:
        """Read the collector's metrics and update their copies: set gauges, and add to counters their latest growth."""
        for family in self._collector.collect():
            if family.type == "histogram":
                self._refresh_histogram(family)
                continue
            for sample in family.samples:
                metric = self._metric(family).labels(**sample.labels)
                if family.type == "gauge":
                    metric.set(sample.value)
                else:
                    metric.inc(self._added(sample))

    def _refresh_histogram(self, family: Any) -> None:
        """Add a histogram's new rows to its copy: observe each draft length once for each new row.

        The collected buckets are cumulative: each counts all rows up to its length.
        """
        below: dict[tuple[str, ...], float] = {}
        for sample in family.samples:
            if not sample.name.endswith("_bucket") or sample.labels["le"] == "+Inf":
                continue
            labels = {name: value for name, value in sample.labels.items() if name != "le"}
            key = tuple(labels.values())
            added = self._added(sample)
            for _ in range(round(added - below.get(key, 0.0))):
                self._metric(family).labels(**labels).observe(float(sample.labels["le"]))
            below[key] = added

    def _metric(self, family: Any) -> Any:
        from prometheus_client import Counter, Gauge, Histogram

        if family.name not in self._metrics:
            sample = family.samples[0]
            labels = [name for name in sample.labels if name != "le"]
            more: dict[str, Any] = {"registry": self._registry}
            kind: Any = Counter
            if family.type == "gauge":
                kind = Gauge
                more["multiprocess_mode"] = "mostrecent"
            elif family.type == "histogram":
                kind = Histogram
                more["buckets"] = sorted({float(one.labels["le"]) for one in family.samples if "le" in one.labels})
            self._metrics[family.name] = kind(family.name, family.documentation, labels, **more)
        return self._metrics[family.name]

    def _added(self, sample: Any) -> float:
        """Return by how much a counter has grown since the last call; a counter that shrank was reset to zero."""
        key = (sample.name, tuple(sample.labels.values()))
        before = self._seen.get(key, 0.0)
        self._seen[key] = sample.value
        return float(sample.value - before if sample.value >= before else sample.value)

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(_PERIOD_S):
            try:
                self.refresh()
            except Exception:
                log.warning("specbranch's metrics stop here, because they could not be copied", exc_info=True)
                return
