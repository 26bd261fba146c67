#!/usr/bin/env python3
"""At which speed ratio c budget, on one core for the target and one for the draft, beats vLLM's own methods on both.

What the best of those gives over bare vLLM on one core comes from benchmarks/duel.jsonl; what
budget would give at other c is simulated on the recorded traces of the same four tasks. Writes break_even.json; needs no engine.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from specbranch.bench.results import mean_speeds, read_results
from specbranch.machine import provenance
from specbranch.simulation.simulate import Layout, Method, simulate
from specbranch.trace import read_trace

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RATIOS = (2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0)
ROW_COST = 0.035  # of a further row, as a share of a draft step: what the run shows


def _speed(c: float) -> float:
    traces = sorted(ROOT.glob("traces/*.gz"))
    return geometric_mean(
        [simulate(read_trace(path), Method("budget"), Layout(c, ROW_COST)).speedup for path in traces]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "break_even.json")
    args = parser.parse_args()
    (measured,) = mean_speeds(read_results(ROOT / "benchmarks" / "duel.jsonl")).values()
    with ProcessPoolExecutor() as pool:
        speeds = dict(zip(RATIOS, pool.map(_speed, RATIOS), strict=True))
    best = max((ratio.value, name) for name, ratio in measured.items() if "both cores" in name)
    turns: dict[str, Any] = {
        f"{factor:g} times": next((c for c, speed in speeds.items() if speed >= factor * best[0]), None)
        for factor in (1.0, 1.25)
    }
    document = {
        "row_cost": ROW_COST,
        "measured": {name: ratio.value for name, ratio in measured.items()},
        "best_rival": best[1],
        "budget_by_c": speeds,
        "turns_at_c": turns,
        "provenance": provenance(),
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
