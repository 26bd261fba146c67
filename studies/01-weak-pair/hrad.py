#!/usr/bin/env python
"""H-RAD trained for the weak pair, in replay: what is refused and how fast, with it and without.

studies/01-weak-pair/hrad.py TRACES --scores HRAD/scores.json --losses LOSSES [--out studies/01-weak-pair/hrad.json]

TRACES is a directory that studies/03-hrad/traces.py wrote: answers to prompts that H-RAD was not trained on, with what it
foresees at every place. The scores are those of `specbranch train fit`, LOSSES is what studies/03-hrad/run.py found; both go
into the result.
"""

import argparse
import json
import math
from pathlib import Path

from specbranch.machine import provenance
from specbranch.simulation.simulate import Layout, Method, simulate
from specbranch.trace import Trace

GAMMA = 5  # the window that H-RAD was trained for
PAPERS_C = 8.0
OUR_C, ROW_COST, TOKEN_COST = 3.6, 0.06, 0.03  # about what float32 costs without AMX; of a draft step, of a target step
NO_TEXT = {"uses_text": False, "uses_memory": False}
METHODS = {
    "pearl": Method("pearl", {"gamma": GAMMA}),
    "specbranch, confidence": Method("specbranch", {"gamma": GAMMA}),
    "specbranch, H-RAD": Method("specbranch", {"gamma": GAMMA}, "hrad"),
    "specbranch, oracle": Method("specbranch", {"gamma": GAMMA}, "oracle"),
    "budget": Method("budget", {"gamma": 15, **NO_TEXT}),
    "budget, least chance 0.4": Method("budget", {"gamma": 15, "min_accept_prob": 0.4, **NO_TEXT}),
    "budget, least chance 0.5": Method("budget", {"gamma": 15, "min_accept_prob": 0.5, **NO_TEXT}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--scores", type=Path, required=True)
    parser.add_argument("--losses", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "hrad.json")
    args = parser.parse_args()
    traces = {path.name.split("-t")[0]: Trace.read(path) for path in sorted(args.traces.glob("*.jsonl.gz"))}
    rows = [
        {
            "c": c,
            "token_cost": token_cost,
            "method": name,
            **replay(traces, method, Layout(c, ROW_COST, 1, token_cost * c)),
        }
        for c, token_cost in ((PAPERS_C, 0.0), (PAPERS_C, 0.05), (OUR_C, TOKEN_COST))
        for name, method in METHODS.items()
    ]
    matches = {task: round(trace.match_share(), 3) for task, trace in traces.items()}
    document = {
        "provenance": provenance(),
        "scores": json.loads(args.scores.read_text()),
        "losses": json.loads(args.losses.read_text())["rows"],
        "matches": matches,
        "replay": rows,
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n")


def replay(traces: dict[str, Trace], method: Method, layout: Layout) -> dict:
    """Mean speed over plain decoding, and refused tokens per emitted token."""
    outcomes = [simulate(trace, method, layout) for trace in traces.values()]
    emitted = sum(outcome.stats.emitted for outcome in outcomes)
    found = {
        "speed": round(math.exp(sum(math.log(outcome.speedup) for outcome in outcomes) / len(outcomes)), 3),
        "rejected": round(sum(outcome.stats.rejected for outcome in outcomes) / emitted, 3),
        "cut": round(sum(outcome.stats.cut for outcome in outcomes) / emitted, 3),
    }
    print(layout.c, layout.token_cost, method, found, flush=True)
    return found


if __name__ == "__main__":
    main()
