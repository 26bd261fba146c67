#!/usr/bin/env python3
"""How a target and a draft on one processor should share its cores, by the simulator on the recorded traces.

One core's step times are measured (a target step of 220 ms, draft rows of 60+2r ms); how they fall with more cores is
assumed: as the number of cores to some power, 1 where nothing is shared, 0.42 as two cores of the test machine give
(1.34 times one). The best division is set against ours, half of the cores for the draft, and against plain
decoding on all cores. Writes placement.json; needs no engine.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from specbranch.launch.placement import split_cores
from specbranch.machine import provenance
from specbranch.simulation.simulate import Layout, Method, simulate
from specbranch.trace import read_trace

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TARGET_MS, FIRST_MS, MORE_MS = 220.0, 62.0, 2.0
CORES = (2, 4, 8, 16, 64)
POWERS = (0.42, 0.7, 1.0)


def _run(job: tuple[float, int, int]) -> dict[str, Any]:
    power, cores, for_draft = job
    step_ms = TARGET_MS / (cores - for_draft) ** power
    first_ms = FIRST_MS / for_draft**power
    layout = Layout(step_ms / first_ms, MORE_MS / FIRST_MS)
    speeds = [simulate(read_trace(path), Method("budget"), layout).speedup for path in sorted(ROOT.glob("traces/*.gz"))]
    over_all = geometric_mean(speeds) * (TARGET_MS / cores**power) / step_ms
    return {"power": power, "cores": cores, "for_draft": for_draft, "over_plain_on_all": over_all}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "placement.json")
    args = parser.parse_args()
    jobs = [
        (power, cores, for_draft)
        for power in POWERS
        for cores in CORES
        for for_draft in sorted({max(1, cores * eighths // 8) for eighths in (1, 2, 3, 4, 5)} & set(range(1, cores)))
    ]
    with ProcessPoolExecutor() as pool:
        runs = list(pool.map(_run, jobs))
    rows = []
    for power in POWERS:
        for cores in CORES:
            own = [run for run in runs if (run["power"], run["cores"]) == (power, cores)]
            best = max(own, key=lambda run: run["over_plain_on_all"])
            ours = len(split_cores(range(cores), target_on_cpu=True, draft_on_cpu=True).draft or ())
            (chosen,) = (run for run in own if run["for_draft"] == ours)
            rows.append(
                {
                    "power": power,
                    "cores": cores,
                    "best_for_draft": best["for_draft"],
                    "best": best["over_plain_on_all"],
                    "ours_for_draft": ours,
                    "ours": chosen["over_plain_on_all"],
                }
            )
            print(
                f"power {power}: {cores:3} cores: best {best['for_draft']} for the draft {best['over_plain_on_all']:.2f}, "
                f"ours {ours}: {chosen['over_plain_on_all']:.2f}"
            )
    args.out.write_text(json.dumps({"rows": rows, "runs": runs, "provenance": provenance()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
