#!/usr/bin/env python3
"""Every planner on traces of prompts that nothing was trained on, at three costs of a draft row; and budget's parts.

Each method at the best of four windows, the same for all tasks. Writes replay.json; needs no engine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from run import traces_in

from specbranch.core.calibration import Calibration
from specbranch.core.costs import PairModel
from specbranch.core.distribution import Distribution
from specbranch.machine import provenance
from specbranch.simulation.simulate import Layout, Method, simulate
from specbranch.trace import read_trace

HERE = Path(__file__).parent
TARGET_MS = 220.0
LAYOUTS = {"50+15r": (50.0, 15.0), "33+2r": (33.0, 2.0), "14+r": (14.0, 1.0)}  # ms of r rows: first number + second * r
WINDOWS = (3, 5, 8, 12)
METHODS: dict[str, Method] = {
    "sps": Method("sps"),
    "adaedl": Method("adaedl"),
    "pearl": Method("pearl"),
    "ssd, 8 guesses": Method("ssd", {"num_guesses": 8}),
    "ssd, 24 guesses": Method("ssd", {"num_guesses": 24}),
    "specbranch": Method("specbranch"),
    "specbranch, hrad": Method("specbranch", predictor="hrad"),
    "specbranch, oracle": Method("specbranch", predictor="oracle"),
    "specbranch, paper": Method("specbranch", {"wait_for_draft": True, "cost_aware": False}),
    "specbranch, paper, hrad": Method("specbranch", {"wait_for_draft": True, "cost_aware": False}, "hrad"),
    "budget": Method("budget"),
    "budget, one row": Method("budget", {"max_rows": 1}),
    "budget, 6 rows": Method("budget", {"max_rows": 6}),
    "budget, not calibrated": Method("budget"),
}


class _OwnWord(Calibration):
    """The draft's own probabilities, whatever the target says."""

    def observe(self, distribution: Distribution, token: int) -> None:
        pass


def _run(job: tuple[Path, str, str, int]) -> dict[str, Any]:
    path, form, name, gamma = job
    trace = read_trace(path)
    base, more = LAYOUTS[form]
    first = base + more
    method = METHODS[name]
    method = replace(method, settings={**method.settings, "gamma": gamma})
    costs = PairModel(calibration=_OwnWord()) if "not calibrated" in name else PairModel()
    outcome = simulate(trace, method, Layout(TARGET_MS / first, more / first), costs=costs)
    return {
        "task": trace.header.task,
        "temperature": trace.header.temperature,
        "rows": form,
        "method": name,
        "gamma": gamma,
        **outcome.as_json(),
    }


def best_windows(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each method, cost of a row and temperature, the runs with the window that is fastest on the mean."""
    groups: dict[tuple[str, str, float], dict[int, list[dict[str, Any]]]] = {}
    for run in found:
        groups.setdefault((run["rows"], run["method"], run["temperature"]), {}).setdefault(run["gamma"], []).append(run)
    best = (max(windows.values(), key=lambda runs: mean(run["speedup"] for run in runs)) for windows in groups.values())
    return [run for runs in best for run in runs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="*", help="default: those of unseen.tar")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--out", type=Path, default=HERE / "replay.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, ProcessPoolExecutor() as pool:
        traces = traces_in(directory, args.traces)
        foreseen = {path for path in traces if read_trace(path).answers[0].foreseen}
        jobs = [
            (path, form, name, gamma)
            for path in traces
            for form in LAYOUTS
            for name in args.methods
            for gamma in WINDOWS
            if path in foreseen or METHODS[name].predictor != "hrad"
        ]
        best = best_windows(list(pool.map(_run, jobs, chunksize=4)))
    for temperature, form in product(sorted({run["temperature"] for run in best}), LAYOUTS):
        print(f"\n{form} ms a row, temperature {temperature:g}")
        for name in args.methods:
            chosen = (form, name, temperature)
            runs = [run for run in best if (run["rows"], run["method"], run["temperature"]) == chosen]
            cells = "  ".join(f"{run['task'][:6]} {run['speedup']:.2f}" for run in runs)
            print(f"{name:24} window {runs[0]['gamma']:2}  mean {mean(r['speedup'] for r in runs):.3f}   {cells}")
    args.out.write_text(json.dumps({"runs": best, "provenance": provenance()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
