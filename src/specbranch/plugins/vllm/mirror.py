"""Our metrics where several API servers share one endpoint.

vLLM then serves what the Prometheus client keeps in files that all its processes share, and asks no collector. So one
process copies what was added, once a second. It must be one only, because the files are summed.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from specbranch.plugins.vllm.metrics import Collector

log = logging.getLogger(__name__)

_PERIOD_S = 1.0


class Mirror:
    """Copies the samples of a collector to metrics of the Prometheus client."""

    def __init__(self, collector: Collector) -> None:
        from prometheus_client import CollectorRegistry

        self._collector = collector
        self._registry = CollectorRegistry()  # not the default one, which nobody serves here
        self._metrics: dict[str, Any] = {}
        self._seen: dict[tuple[str, tuple[str, ...]], float] = {}

    def start(self) -> None:
        """Copy until the process ends."""
        threading.Thread(target=self._run, name="specbranch-metrics", daemon=True).start()

    def refresh(self) -> None:
        """Copy what has changed since the last time."""
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
        """Observe each length as often as rows of it were added; buckets hold all rows of at most their length."""
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
        """By how much a counter has grown; one that is smaller than before was reset."""
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
