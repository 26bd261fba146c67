#!/usr/bin/env python3
"""How well the draft's chances are known: log-loss of "the first choice is right" on traces, each read once in order.

`draft` takes the draft at its word, `shares` learns how often it is right for each band of confidence, `line` is what
`core/calibration.py` does. Writes results/calibration.json; needs no engine.
"""

from __future__ import annotations

import argparse
import json
import math
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path

from specbranch.core.calibration import Calibration
from specbranch.core.distribution import Distribution
from specbranch.trace import Trace, read_trace

ROOT = Path(__file__).parents[1]
_EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)


class _Own(Calibration):
    def observe(self, distribution: Distribution, token: int) -> None:
        pass


class _Shares(Calibration):
    """Frequencies by band of confidence, in which the draft's own word counts as four observations."""

    def __init__(self) -> None:
        super().__init__()
        self._seen, self._right = [0.0] * (len(_EDGES) + 1), [0.0] * (len(_EDGES) + 1)

    def first_chance(self, distribution: Distribution) -> float:
        place = bisect_right(_EDGES, float(distribution.confidence))
        return (self._right[place] + 4 * float(distribution.confidence)) / (self._seen[place] + 4)

    def observe(self, distribution: Distribution, token: int) -> None:
        place = bisect_right(_EDGES, float(distribution.confidence))
        self._seen[place] = self._seen[place] * self._keep + 1
        self._right[place] = self._right[place] * self._keep + (distribution.ids[0] == token)


KINDS: dict[str, Callable[[], Calibration]] = {"draft": _Own, "shares": _Shares, "line": Calibration}


def log_loss(trace: Trace, calibration: Calibration) -> float:
    """The mean over all tokens, each foretold before it is learned from."""
    losses = []
    for answer in trace.answers:
        for token, distribution in zip(answer.tokens, answer.distributions, strict=True):
            if distribution.ids:
                chance = min(max(calibration.first_chance(distribution), 1e-4), 1 - 1e-4)
                losses.append(-math.log(chance if distribution.ids[0] == token else 1 - chance))
                calibration.observe(distribution, token)
    return sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="*", default=sorted((ROOT / "traces").rglob("*.jsonl.gz")))
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "calibration.json")
    args = parser.parse_args()
    rows = []
    for path in args.traces:
        trace = read_trace(path)
        losses = {name: round(log_loss(trace, make()), 4) for name, make in KINDS.items()}
        rows.append({"trace": str(path.relative_to(ROOT)), "tokens": trace.num_tokens, "log_loss": losses})
        print(path.name, trace.num_tokens, losses)
    args.out.write_text(json.dumps({"script": "scripts/calibration_check.py", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
