#!/usr/bin/env python3
"""Forecasts against real runs: every planner of a result file, simulated on the recorded trace of each of its tasks.

Costs come from the run itself (its bare steps, its drafted steps, the draft's own step times), so what is left is the error
of the simulator and of the trace. With --plan they come from a `specbranch plan --out` file instead, so the error is that
of the advice. Writes result.json; needs no engine.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from specbranch.bench.forecast import MeasuredCosts, forecast_speeds, measured_costs
from specbranch.bench.results import Record, Results, cells, compare, read_results
from specbranch.bench.scenario import BARE
from specbranch.bench.survey import Survey
from specbranch.core.costs import StepCost
from specbranch.core.planners.predictors import CONSTANTS
from specbranch.machine import provenance
from specbranch.simulation.simulate import Method
from specbranch.trace import Trace, read_trace

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--traces", default="qwen-coder", help="traces/NAME-TASK.jsonl.gz are replayed")
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    args = parser.parse_args()
    planned = _planned_terms(args.plan) if args.plan else None
    rows: list[dict[str, Any]] = []
    for path in args.results:
        rows += _check(read_results(path), args.traces, planned)
    errors = sorted(abs(row["error"]) for row in rows)
    summary: dict[str, Any] = {"median_error": median(errors), "worst_error": errors[-1]}
    if planned:
        of_plan = [abs(row["planned_error"]) for row in rows]
        summary |= {"median_planned_error": median(of_plan), "worst_planned_error": max(of_plan)}
    args.out.write_text(json.dumps({**summary, "rows": rows, "provenance": provenance()}, indent=1) + "\n")
    for row in rows:
        print(
            f"{row['file']:28} {row['task']:14} {row['method']:12} real {row['real']:.2f}  forecast {row['forecast']:.2f}"
            f"  error {row['error']:+.1%}" + (f"  by plan {row['planned_error']:+.1%}" if planned else "")
        )
    print(json.dumps(summary))


def _check(results: Results, traces: str, planned: MeasuredCosts | None) -> list[dict[str, Any]]:
    rows = []
    for (task, concurrency), methods in cells(results).items():
        path = ROOT / "traces" / f"{traces}-{task}.jsonl.gz"
        if not path.exists() or results.scenario.temperature:
            continue
        trace = _same_prompts(read_trace(path), results, task, methods[BARE])
        for name, records in methods.items():
            chosen = results.method(name)
            # Records from before the draft told its step times cannot be forecast from the run itself.
            told = [record for record in records if record.get("draft_us") and record["draft_us"][0]]
            if chosen.planner in (None, "none") or chosen.predictor not in CONSTANTS or not told:
                continue
            bare = [record for record in methods[BARE] if record.get("step_ms")]
            method = Method(chosen.planner, chosen.settings or {"gamma": results.scenario.gamma})
            real = compare(records, methods[BARE])
            own = _run_terms(bare, told, methods)
            row = {
                "file": results.name,
                "task": task,
                "concurrency": concurrency,
                "method": name,
                "real": real.value,
                "low": real.low,
                "high": real.high,
                "forecast": _whole_speed(trace, method, own, methods[BARE], concurrency),
            }
            row["error"] = row["forecast"] / row["real"] - 1
            if planned:
                row["planned"] = _whole_speed(trace, method, planned, methods[BARE], concurrency)
                row["planned_error"] = row["planned"] / row["real"] - 1
            rows.append(row)
    return rows


def _same_prompts(trace: Trace, results: Results, task: str, records: list[Record]) -> Trace:
    """The answers to the prompts that were measured, as long as they were there; all if the run drew other prompts."""
    (count,) = (chosen.count for chosen in results.scenario.prompts if chosen.task == task)
    answers, limit = trace.answers, results.scenario.max_tokens
    if count == len(answers):
        answers = tuple(answers[place] for place in sorted({record["prompt"] for record in records}))
    cut = (replace(one, tokens=one.tokens[:limit], distributions=one.distributions[:limit]) for one in answers)
    return replace(trace, answers=tuple(cut))


def _run_terms(bare: list[Record], told: list[Record], methods: dict[str, list[Record]]) -> MeasuredCosts:
    """Costs of the run: bare steps, steps of methods that never wait, and what the draft said of itself."""
    alone_s = median(record["step_ms"] for record in bare) / 1e3
    drafted = [record for name in ("specbranch", "pearl") for record in methods.get(name, ()) if record.get("step_ms")]
    beside_s = max(alone_s, median(record["step_ms"] for record in drafted or bare) / 1e3)
    first, more = (median(record["draft_us"][place] for record in told) / 1e6 for place in (0, 1))
    return MeasuredCosts(StepCost(beside_s), StepCost(first, more), beside_s / alone_s)


def _whole_speed(trace: Trace, method: Method, terms: MeasuredCosts, bare: list[Record], concurrency: int) -> float:
    """The forecast for whole requests: reading the prompt takes what it takes."""
    speed = forecast_speeds(trace, method, terms, concurrency).speed
    first_s = sum(record["first_s"] for record in bare)
    rest_s = sum(record["elapsed_s"] for record in bare) - first_s
    return (first_s + rest_s) / (first_s + rest_s / speed)


def _planned_terms(path: Path) -> MeasuredCosts:
    """The costs that `specbranch plan` measured."""
    survey = json.loads(path.read_text())["survey"]

    def by_count(name: str) -> dict[int, float]:
        return {int(count): ms / 1e3 for count, ms in survey[name].items()}

    empty = read_trace(next((ROOT / "traces").glob("*.gz")))
    return measured_costs(
        Survey(by_count("target_alone_ms"), survey["target_beside_ms"] / 1e3, by_count("draft_ms"), empty)
    )


if __name__ == "__main__":
    main()
