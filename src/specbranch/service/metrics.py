"""Prometheus metrics of a service, collected when they are asked for. Needs the `metrics` extra."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specbranch.service.figures import Figures

PREFIX = "specbranch_draft_"


def serve_metrics(figures: Figures, port: int, host: str = "127.0.0.1") -> Any:
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
    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for family in self._figures.families():
            kind = CounterMetricFamily if family.is_counter else GaugeMetricFamily
            metric = kind(PREFIX + family.name, family.text, labels=[family.label] if family.label else [])
            for label, value in family.values.items():
                metric.add_metric([label] if label else [], value)
            yield metric
