"""Prometheus metrics of a service, collected when they are asked for. Needs the `metrics` extra."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specbranch.core.rollback import CAUSES
from specbranch.core.stats import Stats
from specbranch.service.server import Server


def serve_metrics(server: Server, port: int, host: str = "127.0.0.1") -> Any:
    """Answer scrapes at a port; returns what must be shut down."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise ImportError("metrics need prometheus_client: pip install 'specbranch[metrics]'") from error
    registry = CollectorRegistry()
    registry.register(_Collector(server))
    httpd, _ = start_http_server(port, addr=host, registry=registry)
    return httpd


class _Collector:
    def __init__(self, server: Server) -> None:
        self._server = server

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, text, value in counters(self._server):
            yield CounterMetricFamily(f"specbranch_draft_{name}", text, value=value)
        rolled = CounterMetricFamily(
            "specbranch_draft_rolled_back_tokens", "Drafted tokens that a verdict made useless.", labels=["cause"]
        )
        stats = self._server.store.stats()
        for cause in CAUSES:
            rolled.add_metric([cause], getattr(stats, cause))
        yield rolled
        undrafted = CounterMetricFamily(
            "specbranch_draft_undrafted", "Texts that were not drafted for, by reason.", labels=["reason"]
        )
        for reason, count in self._server.store.undrafted.counts().items():
            undrafted.add_metric([reason], count)
        yield undrafted
        for name, text, value in gauges(self._server):
            yield GaugeMetricFamily(f"specbranch_draft_{name}", text, value=value)


def counters(server: Server) -> list[tuple[str, str, float]]:
    """Name, meaning and value of everything that only grows."""
    stats: Stats = server.store.stats()
    lookup, compute = server.dispatch.counts, server.compute.counts
    return [
        ("hits", "Verdicts whose root had been drawn and run.", stats.hits),
        ("misses", "Verdicts that were not prepared.", stats.rounds - stats.hits),
        ("submitted_tokens", "Tokens proposed for verification.", stats.submitted),
        ("accepted_tokens", "Proposed tokens that the target accepted.", stats.accepted),
        ("rows", "Draft rows run.", compute.rows),
        ("steps", "Draft steps run.", compute.steps),
        ("step_seconds", "Time in draft steps.", compute.step_s),
        ("failed_steps", "Draft steps that the engine refused.", compute.failed_steps),
        ("borrowed_tokens", "Tokens not prefilled because another session's cache held them.", compute.borrowed_tokens),
        ("lookups", "Sequences looked up.", lookup.lookups),
        ("unknown", "Lookups of a sequence that was not known.", lookup.unknown),
        ("opened", "Sequences opened.", lookup.opened),
        ("refused_frames", "Messages that were refused.", lookup.refused),
        (
            "faults",
            "Exceptions that cost one session or one answer.",
            server.dispatch.faults.count + server.compute.faults.count,
        ),
        ("outlooks", "Verdicts that came with what the target foresees.", lookup.outlooks),
        ("overdue", "Answers given without a full draft because time was up.", lookup.overdue),
        ("wait_seconds", "Time that answers were held back for a draft.", lookup.wait_s),
        ("evictions", "Sessions forgotten for want of room.", server.store.num_evictions),
    ]


def gauges(server: Server) -> list[tuple[str, str, float]]:
    """Name, meaning and value of everything that goes up and down."""
    return [
        ("sessions", "Sessions remembered.", len(server.store)),
        ("session_tokens", "Tokens of sequence remembered.", server.store.num_tokens),
    ]
