#!/usr/bin/env python3
"""What is refused on a weakly aligned pair where verifying a token costs time: pearl, specbranch and budget at c = 8.

Writes prices.json beside this file.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path

from specbranch.machine import provenance
from specbranch.simulation.presets import PAIRS, make_trace
from specbranch.simulation.simulate import Layout, Method, method_for, simulate

SEEDS = range(3)
TOKENS = 2000
TOKEN_COSTS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)  # of a further token in the target's step, over a step of one
PAIR = PAIRS["vicuna-68m-13b"]
NO_TEXT = {"uses_text": False, "uses_memory": False}
METHODS = {
    "pearl": method_for("pearl", PAIR),
    "specbranch, confidence only": method_for("specbranch", PAIR),
    "specbranch, oracle for H-RAD": method_for("specbranch", PAIR, "oracle"),
    "budget, without prices": Method("budget", {"gamma": 8, "cost_aware": False, **NO_TEXT}),
    "budget": Method("budget", {"gamma": 8, **NO_TEXT}),
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    traces = [make_trace(PAIR, TOKENS // 250, 250, random.Random(seed)) for seed in SEEDS]
    rows = []
    for cost in TOKEN_COSTS:
        layout = Layout(PAIR.c, PAIR.row_cost, token_cost=cost * PAIR.c)
        for name, method in METHODS.items():
            found = [simulate(trace, method, layout) for trace in traces]
            speeds = [one.speedup for one in found]
            refused = statistics.mean(one.stats.rejected / one.stats.emitted for one in found)
            row = {"token_cost": cost, "method": name, "speed": round(statistics.mean(speeds), 3)}
            rows.append({**row, "spread": round(statistics.stdev(speeds), 3), "refused": round(refused, 3)})
            print(rows[-1], flush=True)
    document = {"provenance": provenance(), "pair": PAIR.name, "rows": rows}
    (Path(__file__).parent / "prices.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
