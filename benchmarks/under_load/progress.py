"""What the long runs share: their arguments, the file of what a run has done, and trends in what it saw."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Line = dict[str, Any]
SPANS = 20


def parser_for(text: str | None) -> argparse.ArgumentParser:
    """Make a parser for the prompts and the pair of models; its help begins with `text`."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory of the prompts")
    parser.add_argument("--target", default="smollm2-135m-dense", help="a path, or a name below $SPECBRANCH_MODELS")
    parser.add_argument("--draft", default="smollm2-short", help="the same")
    return parser


class Progress:
    """The JSON lines of a run, the first of them its header, so that a run that starts again goes on.

    A file with another header belongs to another run, and ends this one.
    """

    def __init__(self, path: Path, header: Line) -> None:
        self.lines: list[Line] = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        header = {"what": "header", **json.loads(json.dumps(header))}
        if self.lines and self.lines[0] != header:
            raise SystemExit(
                f"{path} is of another run (commit, seed, models or sizes); delete it, or name another --out"
            )
        self._path = path
        if not self.lines:
            self.add(header)

    def add(self, line: Line) -> None:
        """Keep a line and write it to disk at once."""
        self.lines.append(line)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def of(self, what: str, **fields: Any) -> list[Line]:
        """Return the lines of one kind with these values."""
        wanted = {"what": what, **fields}
        return [line for line in self.lines if all(line.get(key) == value for key, value in wanted.items())]


@dataclass(frozen=True, slots=True)
class Slope:
    """How much y grows with x, and the standard error of that."""

    value: float
    error: float


def slope(x: Sequence[float], y: Sequence[float], num_spans: int = SPANS) -> Slope | None:
    """Fit a line to the means of equal spans and return its slope; return None for fewer than three spans.

    Neighbouring samples depend on each other, so a fit to every sample would make the error look smaller than it is.
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
    """Return the count, p50 and p99, or None without values."""
    if not values:
        return None
    low, high = np.percentile(np.asarray(values, float) * scale, [50, 99])
    return {"count": len(values), "p50": round(float(low), 2), "p99": round(float(high), 2)}
