#!/usr/bin/env python3
"""What waiting after a miss and running every branch cost: forms of specbranch, and pearl, on recorded traces.

Every method at its best window. Writes results/replay_forms.json; needs no engine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from specbranch.simulation.simulate import Layout, Method, best_gamma
from specbranch.trace import read_trace

ROOT = Path(__file__).parents[1]
TASKS = ("humaneval", "gsm8k", "summarization", "chat")
LAYOUTS = ((3.3, 0.35), (5.0, 0.2), (8.0, 0.1), (16.0, 0.05))  # c, cost of a further row
FORMS: dict[str, Method] = {
    "pearl": Method("pearl", {"gamma": 5}),
    "paper": Method("specbranch", {"gamma": 8, "waits": True, "is_thrifty": False}),
    "no wait": Method("specbranch", {"gamma": 8, "waits": False, "is_thrifty": False}),
    "thrifty": Method("specbranch", {"gamma": 8, "waits": True, "is_thrifty": True}),
    "served": Method("specbranch", {"gamma": 8, "waits": False, "is_thrifty": True}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "replay_forms.json")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for task in TASKS:
        trace = read_trace(ROOT / "traces" / f"qwen-coder-{task}.jsonl.gz")
        for c, row_cost in LAYOUTS:
            found = {name: best_gamma(trace, form, Layout(c, row_cost)) for name, form in FORMS.items()}
            speeds = {name: round(outcome.speedup, 3) for name, outcome in found.items()}
            rows.append({"task": task, "c": c, "row_cost": row_cost, "speedup": speeds})
            print(
                f"{task:14} c {c:4g} row {row_cost:4g}  "
                + "  ".join(f"{name} {speed:.2f}" for name, speed in speeds.items())
            )
    args.out.write_text(json.dumps({"script": "scripts/replay_forms.py", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
