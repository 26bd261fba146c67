"""A page of Prometheus metrics: the text of an endpoint, as samples."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Sample:
    """One number of a page."""

    name: str
    labels: Mapping[str, str]
    value: float


def read_page(text: str) -> Iterator[Sample]:
    """The samples of a page; comments and what is no sample are left out."""
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found is None:
            continue
        name, labels, value = found.groups()
        try:
            yield Sample(name, dict(_LABEL.findall(labels or "")), float(value))
        except ValueError:
            continue
