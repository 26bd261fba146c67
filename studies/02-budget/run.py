#!/usr/bin/env python3
"""Hit rate against draft rows: how many rows each planner needs to be prepared for the verdict, on recorded traces.

A row costs the same as none here, so that only where rows go makes a difference. `known stop` is an allocator that is
told where the target will stop and ranks only the token there: what any allocator can reach at most with such a draft.
Replays the traces of unseen.tar. Writes result.json and figure.png; needs no engine.
"""

from __future__ import annotations

import argparse
import json
import tarfile
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

from specbranch.extensions import load_pyplot
from specbranch.machine import provenance
from specbranch.simulation.simulate import Layout, Method, simulate
from specbranch.trace import Trace, read_trace

HERE = Path(__file__).parent
C = 6.3
GAMMA = 5
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
PLANNERS: dict[str, str | None] = {
    "pearl": None,
    "ssd": "num_guesses",
    "specbranch": "max_branches",
    "budget": "max_rows",
}
COLOURS = {"pearl": "#d1495b", "ssd": "#f4a261", "specbranch": "#1982c4", "budget": "#2a9d8f", "known stop": "#8d99ae"}


def traces_in(directory: str, given: list[Path]) -> list[Path]:
    """The given traces, or those of prompts that H-RAD was not trained on, unpacked to the directory."""
    if given:
        return given
    with tarfile.open(HERE / "unseen.tar") as archive:
        archive.extractall(directory, filter="data")
    return sorted(Path(directory).glob("*.jsonl.gz"))


def _run(job: tuple[Path, str, int]) -> dict[str, Any]:
    path, planner, rows = job
    trace = read_trace(path)
    place = {"task": trace.header.task, "temperature": trace.header.temperature, "planner": planner, "rows": rows}
    if planner == "known stop":
        return {**place, "hit_rate": known_stop(trace, rows)}
    name = PLANNERS[planner]
    settings = {"gamma": GAMMA} if name is None else {"gamma": GAMMA, name: rows}
    outcome = simulate(trace, Method(planner, settings), Layout(C))
    figures = outcome.as_json()
    return {**place, **{key: figures[key] for key in ("hit_rate", "rows_per_round", "speedup", "emitted_per_round")}}


def known_stop(trace: Trace, rows: int) -> float:
    """Share of verdicts whose token is among the first `rows` at the place where the target stops."""
    hits = rounds = 0
    for answer in trace.answers:
        place = 0
        while place < len(answer.tokens):
            stop = place
            while stop < len(answer.tokens) - 1 and stop < place + GAMMA and _rank(answer, stop) == 0:
                stop += 1
            is_refused = stop < place + GAMMA  # then the draft's first choice is known to be wrong
            rank = _rank(answer, stop)
            rounds += 1
            hits += rank is not None and rank - is_refused < rows
            place = stop + 1
    return hits / rounds


def _rank(answer: Any, place: int) -> int | None:
    ids = answer.distributions[place].ids
    return ids.index(answer.tokens[place]) if answer.tokens[place] in ids else None


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """One panel for each task and temperature."""
    pyplot = load_pyplot()
    panels = sorted({(run["temperature"], run["task"]) for run in found})
    columns = (len(panels) + 1) // 2
    figure, axes = pyplot.subplots(
        2, columns, figsize=(3.4 * columns, 6.4), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, (temperature, task) in zip(axes.flat, panels, strict=False):
        for planner, colour in COLOURS.items():
            runs = [
                run
                for run in found
                if (run["temperature"], run["task"], run["planner"]) == (temperature, task, planner)
            ]
            style = {"linestyle": "--"} if planner == "known stop" else {"marker": "o", "markersize": 3.5}
            axis.plot(
                [run["rows"] for run in runs], [run["hit_rate"] for run in runs], color=colour, label=planner, **style
            )
        axis.set(title=f"{task}, temperature {temperature:g}", xscale="log", xticks=ROWS, ylim=(0, 1.02))
        axis.set_xticklabels([str(rows) for rows in ROWS])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel("hit rate")
    for axis in axes[-1]:
        axis.set_xlabel("rows of a draft step at most")
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="*", help="default: those of unseen.tar")
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    parser.add_argument("--plot", type=Path, default=HERE / "figure.png")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, ProcessPoolExecutor() as pool:
        jobs = [
            (path, planner, rows)
            for path in traces_in(directory, args.traces)
            for planner in (*PLANNERS, "known stop")
            for rows in (ROWS if planner != "pearl" else (1,))
        ]
        found = list(pool.map(_run, jobs, chunksize=2))
    for temperature in sorted({run["temperature"] for run in found}):
        print(f"temperature {temperature:g}")
        chosen = [run for run in found if run["temperature"] == temperature]
        for planner in (*PLANNERS, "known stop"):
            by_rows = {
                rows: [run["hit_rate"] for run in chosen if (run["planner"], run["rows"]) == (planner, rows)]
                for rows in ROWS
            }
            print(f"{planner:12}", "  ".join(f"{rows}: {mean(rates):.3f}" for rows, rates in by_rows.items() if rates))
    document = {"c": C, "gamma": GAMMA, "runs": found, "provenance": provenance()}
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    draw(found, args.plot)


if __name__ == "__main__":
    main()
