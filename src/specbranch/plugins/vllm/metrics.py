"""Our metrics on vLLM's own Prometheus endpoint.

The proposer counts in vLLM's worker and writes its counters to a stats file; hits and rolled-back tokens are known to
the draft service alone. Both are fetched when somebody scrapes, so a target that is not watched pays for nothing. As
long as no proposer of ours runs, nothing appears.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from specbranch.core.rollback import CAUSES
from specbranch.plugins.vllm.settings import client_keys
from specbranch.plugins.vllm.stats_file import Shown, read_stats_files
from specbranch.service.reporter import Reach, Reporter
from specbranch.service.wire import StatsReply

log = logging.getLogger(__name__)

STATES = ("on", "closed", "lagging", "unreachable", "off")
_TIMEOUT_S = 0.04  # for all services together
_LABELS = ["model_name", "engine"]
_COUNTS = {
    "calls": ("calls", "Engine steps in which the draft service was asked or told."),
    "answered": ("answered", "Calls that were answered in time."),
    "timeouts": ("timeouts", "Calls whose answer did not come in time."),
    "unreachable": ("unreachable", "Calls for which there was no draft service."),
    "unawaited": ("unawaited", "Calls that told the draft service and did not wait for it, because it lagged."),
    "opened": ("opened", "Texts sent to the draft service in full."),
    "refused": ("refused", "Messages that either side refused."),
    "foreign": ("foreign", "Drafts cut before a token that is not in the target's vocabulary."),
    "faults": ("faults", "Calls that met a fault of our own."),
    "wait_s": ("wait_seconds", "Time that the target waited for drafts."),
}
_FIGURES: dict[str, tuple[str, Callable[[StatsReply], int]]] = {
    "hits": ("Verdicts whose root the draft had drawn and run.", lambda figures: figures.hits),
    "misses": ("Verdicts that were not prepared.", lambda figures: figures.rounds - figures.hits),
    "accepted_tokens": ("Submitted tokens that were accepted.", lambda figures: figures.accepted),
    "draft_rows": ("Draft rows run for this target.", lambda figures: figures.rows),
}


class Collector:
    """Gathers what the engines of a run show and what their draft services say. Never raises, never waits long."""

    def __init__(self, run: str, timeout_s: float = _TIMEOUT_S) -> None:
        self._run = run
        self._timeout_s = timeout_s
        self._reporters: dict[tuple[str, bytes, str], Reporter] = {}
        self._lock = threading.Lock()

    def describe(self) -> list[Any]:
        """Nothing can be said before a proposer runs."""
        return []

    def collect(self) -> list[Any]:
        """All metrics of this moment."""
        with self._lock:
            try:
                stats_files = list(read_stats_files(self._run))
                return [family for family in self._families(stats_files) if family.samples] if stats_files else []
            except Exception:
                log.warning("the metrics of specbranch could not be collected", exc_info=True)
                return []

    def close(self) -> None:
        """Let go of all connections."""
        with self._lock:
            self._close_all_but([])

    def _families(self, stats_files: Sequence[Shown]) -> Iterator[Any]:
        groups = self._ask(stats_files)
        yield self._states(groups)
        yield from _of_proposers(stats_files)
        yield from _of_services([(group, reporter.stats) for group, reporter, _ in groups if reporter is not None])

    def _ask(self, stats_files: Sequence[Shown]) -> list[tuple[list[Shown], Reporter | None, Reach]]:
        """Engines that share a namespace, with what is known of their service; services have one deadline in all."""
        end_s = time.monotonic() + self._timeout_s
        asked: list[tuple[list[Shown], Reporter | None, Reach]] = []
        for key, group in itertools.groupby(sorted(stats_files, key=_service_of), key=_service_of):
            if not key[1]:
                asked.append((list(group), None, Reach.ABSENT))
                continue
            reporter = self._reporter(*key)
            asked.append((list(group), reporter, reporter.ask(max(end_s - time.monotonic(), 0.0))))
        self._close_all_but([_service_of(group[0]) for group, _, _ in asked])
        return asked

    def _reporter(self, address: str, namespace: bytes, keys: str) -> Reporter:
        key = (address, namespace, keys)
        if key not in self._reporters:
            self._reporters[key] = Reporter(address, namespace, client_keys(keys or None))
        return self._reporters[key]

    def _close_all_but(self, wanted: Sequence[tuple[str, bytes, str]]) -> None:
        """A proposer that took other settings has another namespace from then on."""
        for key in [key for key in self._reporters if key not in wanted]:
            self._reporters.pop(key).close()

    def _states(self, groups: Sequence[tuple[list[Shown], Reporter | None, Reach]]) -> Any:
        from prometheus_client.core import GaugeMetricFamily

        family = GaugeMetricFamily(
            "specbranch_state", "1 for the state that drafting is in, 0 for the others.", labels=[*_LABELS, "state"]
        )
        for group, reporter, reach in groups:
            for shown in group:
                now = "off" if reporter is None else state_of(shown, reach)
                for state in STATES:
                    family.add_metric([*_labels([shown]), state], float(state == now))
        return family


def state_of(shown: Shown, reach: Reach) -> str:
    """What drafting is, from the target's view and from our own question to the service."""
    if reach is Reach.ABSENT:
        return "unreachable"
    if shown.is_lagging or reach is Reach.SILENT:
        return "lagging"
    return "closed" if shown.is_closed else "on"


def _service_of(shown: Shown) -> tuple[str, bytes, str]:
    return (shown.address, shown.namespace, shown.keys or "")


def _labels(group: Sequence[Shown]) -> list[str]:
    """Engines that share a namespace share what the service counts for it."""
    return [group[0].model, ",".join(str(shown.engine) for shown in sorted(group, key=lambda shown: shown.engine))]


def _of_proposers(stats_files: Sequence[Shown]) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

    for key, (name, text) in _COUNTS.items():
        family = CounterMetricFamily(f"specbranch_{name}", text, labels=_LABELS)
        for shown in stats_files:
            family.add_metric(_labels([shown]), shown.counts.get(key, 0.0))
        yield family
    aside = CounterMetricFamily(
        "specbranch_aside_rows", "Rows that stood aside, by what the draft lacks.", labels=[*_LABELS, "cause"]
    )
    submitted = HistogramMetricFamily(
        "specbranch_submitted_tokens", "Length of submissions; 0 where a row went without.", labels=_LABELS
    )
    for shown in stats_files:
        for cause in ("lora", "multimodal"):
            aside.add_metric([*_labels([shown]), cause], shown.asides.get(cause, 0))
        submitted.add_metric(_labels([shown]), *_buckets(shown.lens))
    yield aside
    yield submitted


def _buckets(lens: Sequence[int]) -> tuple[list[tuple[str, float]], float]:
    """Rows of at most each length, and the sum of all lengths."""
    totals = list(itertools.accumulate(lens))
    bounds: list[tuple[str, float]] = [(f"{length}.0", float(total)) for length, total in enumerate(totals)]
    return [*bounds, ("+Inf", float(totals[-1]))], float(sum(length * rows for length, rows in enumerate(lens)))


def _of_services(known: Sequence[tuple[list[Shown], StatsReply | None]]) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    answered = [(_labels(group), figures) for group, figures in known if figures is not None]
    for name, (text, value) in _FIGURES.items():
        family = CounterMetricFamily(f"specbranch_{name}", text, labels=_LABELS)
        for labels, figures in answered:
            family.add_metric(labels, value(figures))
        yield family
    rolled_back = CounterMetricFamily(
        "specbranch_rolled_back_tokens", "Drafted tokens that a verdict made useless.", labels=[*_LABELS, "cause"]
    )
    sessions = GaugeMetricFamily("specbranch_sessions", "Sessions that the draft service remembers.", labels=_LABELS)
    for labels, figures in answered:
        for cause in CAUSES:
            rolled_back.add_metric([*labels, cause], getattr(figures, cause))
        sessions.add_metric(labels, figures.sessions)
    yield rolled_back
    yield sessions
