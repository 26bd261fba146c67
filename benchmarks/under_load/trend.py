"""A line through a series whose neighbours depend on each other: its slope and how sure it is. Also percentiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SPANS = 20


@dataclass(frozen=True, slots=True)
class Slope:
    """By how much y grows with x, and the standard error of that."""

    value: float
    error: float


def slope(x: Sequence[float], y: Sequence[float], num_spans: int = SPANS) -> Slope | None:
    """The slope of the least-squares line through the means of equal spans; None of fewer than three spans.

    Samples that follow each other are alike, so that each alone would make the error look smaller than it is.
    """
    num_spans = min(num_spans, len(x))
    if num_spans < 3:
        return None
    xs, ys = (np.array([part.mean() for part in np.array_split(np.asarray(some, float), num_spans)]) for some in (x, y))
    spread = float(((xs - xs.mean()) ** 2).sum())
    if spread == 0.0:
        return None
    value = float(((xs - xs.mean()) * (ys - ys.mean())).sum()) / spread
    left = ys - ys.mean() - value * (xs - xs.mean())
    return Slope(value, math.sqrt(float((left**2).sum()) / (num_spans - 2) / spread))


def percentiles(values: Sequence[float], scale: float = 1.0) -> dict[str, float | int] | None:
    """Count, p50 and p99; None of nothing."""
    if not values:
        return None
    low, high = np.percentile(np.asarray(values, float) * scale, [50, 99])
    return {"count": len(values), "p50": round(float(low), 2), "p99": round(float(high), 2)}
