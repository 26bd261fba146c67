#!/usr/bin/env python3
"""Simulate the paper's tables and figures: result.json; `page.py` then writes docs/paper.md and the pictures from it.

    studies/10-paper/run.py            # everything: about half an hour on two cores
    studies/10-paper/run.py --quick    # the same with less text: minutes; writes build/paper-quick.json

The threshold for a doubtful distribution and the number of branches are chosen on recorded traces of another pair
(`traces/`), before any preset is simulated.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich.progress import Progress

from specbranch.core.node import Node
from specbranch.machine import provenance
from specbranch.simulation.loop import DraftStep, Step
from specbranch.simulation.presets import PAIRS, ModelPair, make_trace, pearl_speed, solve_acceptance
from specbranch.simulation.simulate import Layout, Method, method_for, simulate
from specbranch.trace import Trace, read_trace

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ANSWER_LEN = 250
CONFIDENCES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
BRANCHES = (6, 12)
WEAK = "vicuna-68m-13b"
CORRELATION = 0.35  # the middle of what recorded traces have
POWERS = (0.1, 0.25, 1.0)  # of the draft's device while it computes, over the target's

# What the paper reports, by second-hand notes: speed over plain decoding.
CELLS = {
    "llama-68m-7b": {"HumanEval": (1.69, 2.04), "GSM8K": (1.86, 2.12), "CNN/DM": (1.66, 1.87)},
    "vicuna-68m-13b": {"HumanEval": (2.02, 2.47), "GSM8K": (1.61, 1.95), "CNN/DM": (1.68, 1.89)},
    "deepseek-1.3b-33b": {"HumanEval": (3.39, 3.71), "GSM8K": (2.78, 3.02), "CNN/DM": (2.63, 2.97)},
    "llama3-8b-70b": {"HumanEval": (3.75, 4.02), "GSM8K": (3.35, 3.67), "CNN/DM": (3.04, 3.37)},
}
AVERAGES = {
    "llama-68m-7b": (1.74, 2.01), "vicuna-68m-13b": (1.77, 2.10),
    "deepseek-1.3b-33b": (2.93, 3.23), "llama3-8b-70b": (3.38, 3.69),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One simulation: a method on a pair, with a seed for its trace; `recorded` names a trace to replay instead."""

    section: str
    key: tuple[Any, ...]
    pair: ModelPair
    method: Method
    seed: int
    num_tokens: int
    layout: Layout
    recorded: str | None = None


@lru_cache(maxsize=8)
def trace_of(pair: ModelPair, seed: int, num_tokens: int) -> Trace:
    return make_trace(pair, max(1, num_tokens // ANSWER_LEN), min(num_tokens, ANSWER_LEN), random.Random(seed))


class Cells:
    """Counts the cells of the draft's cache for tokens that are not committed: nodes that were run, and not rolled back."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self.most = 0

    def observe(self, step: DraftStep) -> None:
        nodes = [*self._nodes, *step.nodes]  # of a root, which is committed, the parent is None
        self._nodes = [node for node in nodes if node.outcome is None and node.parent is not None]
        self.most = max(self.most, len(self._nodes))


def simulated(case: Case) -> dict[str, Any]:
    """Return the figures of one simulation."""
    trace = (
        read_trace(ROOT / "traces" / case.recorded)
        if case.recorded
        else trace_of(case.pair, case.seed, case.num_tokens)
    )
    cells, draft_s, target_s, num_breaks = Cells(), 0.0, 0.0, 0
    is_parallel = case.method.planner not in ("sps", "adaedl")  # these never draft after what they submit

    def observe(step: Step) -> None:
        nonlocal draft_s, target_s, num_breaks
        if isinstance(step, DraftStep):
            cells.observe(step)
            draft_s += step.end_s - step.start_s
        else:
            target_s += step.end_s - step.start_s
            for num_submitted, verdict, is_hit in zip(step.submitted, step.verdicts, step.hits, strict=True):
                num_breaks += verdict.accepted < num_submitted or (is_parallel and not is_hit)

    outcome = simulate(trace, case.method, case.layout, observe=observe)
    stats = outcome.stats
    plain_s = outcome.speedup * outcome.elapsed_s
    return {
        "speed": outcome.speedup,
        "rollback_rate": stats.rollback_rate,
        "rollback_rate_with_losing": stats.rollback_rate_with_losing,
        "rejected": stats.rejected / stats.emitted,
        "refused_share": stats.rejected / max(stats.submitted, 1),
        "run_length": (stats.emitted - num_breaks) / max(num_breaks, 1),
        "emitted_per_round": stats.emitted_per_round,
        "cells": cells.most,
        # Of plain decoding's energy: the target draws 1 while it computes, the draft's device `power`.
        "energy": {str(power): (target_s + power * draft_s) / plain_s for power in POWERS},
    }


def with_settings(method: Method, **settings: Any) -> Method:
    return replace(method, settings={**method.settings, **settings})


def paper_form(pair: ModelPair, predictor: str, chosen: dict[str, Any]) -> Method:
    """SpecBranch as in the paper, with the chosen threshold and number of branches."""
    return with_settings(method_for("specbranch", pair, predictor), **chosen)


def layout_of(pair: ModelPair, batch: int = 1, token_cost: float = 0.0) -> Layout:
    return Layout(pair.c, pair.row_cost, batch, token_cost)


class Plan:
    """Collects the cases of all sections, each with every seed."""

    def __init__(self, num_seeds: int, num_tokens: int) -> None:
        self._num_seeds, self._num_tokens = num_seeds, num_tokens
        self.cases: list[Case] = []

    def add(
        self,
        section: str,
        key: Sequence[Any],
        pair: ModelPair,
        method: Method,
        *,
        num_seeds: int = 3,
        layout: Layout | None = None,
    ) -> None:
        for seed in range(min(num_seeds, self._num_seeds)):
            place = layout or layout_of(pair)
            self.cases.append(Case(section, tuple(key), pair, method, seed, self._num_tokens, place))


def choose(pool: ProcessPoolExecutor) -> dict[str, Any]:
    """Choose threshold and number of branches on recorded traces of another pair, for the paper's form."""
    cases = []
    for path in sorted(ROOT.glob("traces/*.gz")):
        share = read_trace(path).match_share()
        for c in (5, 8):
            pair = ModelPair(path.name, float(c), c, share, "recorded")
            methods = {("pearl",): method_for("pearl", pair)}
            for confidence in CONFIDENCES:
                for branches in BRANCHES:
                    chosen = {"confidence": confidence, "max_branches": branches}
                    methods[confidence, branches] = paper_form(pair, "confidence", chosen)
            cases += [
                Case(f"{path.name}, c {c}", key, pair, method, 0, 0, layout_of(pair), path.name)
                for key, method in methods.items()
            ]
    speeds: dict[str, dict[tuple[Any, ...], float]] = {}
    for case, figures in zip(cases, pool.map(simulated, cases), strict=True):
        speeds.setdefault(case.section, {})[case.key] = figures["speed"]
    over_pearl = {
        (confidence, branches): statistics.geometric_mean(
            found[confidence, branches] / found["pearl",] for found in speeds.values()
        )
        for confidence in CONFIDENCES
        for branches in BRANCHES
    }
    best = max(over_pearl, key=lambda key: over_pearl[key])
    return {
        "confidence": best[0],
        "max_branches": best[1],
        "over_pearl": [
            {"confidence": confidence, "max_branches": branches, "over_pearl": speed}
            for (confidence, branches), speed in over_pearl.items()
        ],
    }


def add_pairs(plan: Plan, chosen: dict[str, Any]) -> None:
    """The four pairs at their average acceptance, by method; also with confidences that are alike at neighbours."""
    for name, plain in PAIRS.items():
        for correlation in (0.0, CORRELATION):
            pair = replace(plain, correlation=correlation)
            methods = {planner: method_for(planner, pair) for planner in ("sps", "adaedl", "pearl", "budget")}
            methods["budget, min_accept_prob 0.4"] = with_settings(methods["budget"], min_accept_prob=0.4)
            methods["specbranch, served"] = method_for("specbranch", pair, as_in_paper=False)
            methods["specbranch, confidence"] = paper_form(pair, "confidence", chosen)
            methods["specbranch, oracle"] = paper_form(pair, "oracle", chosen)
            for label, method in methods.items():
                plan.add("pairs", (name, correlation, label), pair, method, num_seeds=5)
        ablations = {
            "full": paper_form(plain, "oracle", chosen),
            "without branches": paper_form(plain, "oracle", {**chosen, "max_branches": 1}),
            "without H-RAD, confidence": paper_form(plain, "confidence", chosen),
            "without H-RAD, fixed length": paper_form(plain, "all", chosen),
        }
        for label, method in ablations.items():
            plan.add("ablation", (name, label), plain, method, num_seeds=5)


def add_cells(plan: Plan, chosen: dict[str, Any]) -> None:
    """The main table: each pair and task, with the acceptance at which PEARL has its published speed."""
    for name, tasks in CELLS.items():
        base = PAIRS[name]
        for task, (pearl, _) in tasks.items():
            solved = solve_acceptance(lambda a, base=base: pearl_speed(a, base.gamma, base.c), pearl)
            pair = replace(base, acceptance=solved)
            methods = {
                "pearl": method_for("pearl", pair),
                "specbranch, confidence": paper_form(pair, "confidence", chosen),
                "specbranch, oracle": paper_form(pair, "oracle", chosen),
                "budget": method_for("budget", pair),
            }
            for label, method in methods.items():
                plan.add("cells", (name, task, label), pair, method)


def add_sweeps(plan: Plan, chosen: dict[str, Any]) -> None:
    """Threshold, branches, gamma, c and acceptance, each on the weak pair and the first two on a strong one too."""
    for name in (WEAK, "llama3-8b-70b"):
        pair = PAIRS[name]
        for predictor in ("confidence", "oracle"):
            for tenth in range(10):
                method = paper_form(pair, predictor, {**chosen, "confidence": tenth / 10})
                plan.add("epsilon", (name, predictor, tenth / 10), pair, method)
            for branches in (1, 2, 4, 6, 8, 12, 16):
                method = paper_form(pair, predictor, {**chosen, "max_branches": branches})
                plan.add("branches", (name, predictor, branches), pair, method)
    weak = PAIRS[WEAK]
    for label in ("pearl", "specbranch, confidence", "budget"):
        for gamma in (1, 2, 4, 6, 8, 10, 12):
            plan.add("gamma", (label, gamma), *labelled(replace(weak, gamma=gamma), label, chosen))
        for c in (2, 3, 4, 6, 8, 12, 16):
            plan.add("c", (label, c), *labelled(replace(weak, c=float(c), gamma=c), label, chosen))
        for twentieth in (6, 8, 10, 12, 14, 16, 18, 19):
            plan.add(
                "acceptance",
                (label, twentieth / 20),
                *labelled(replace(weak, acceptance=twentieth / 20), label, chosen),
            )
        for batch in (1, 4, 16):
            pair, method = labelled(weak, label, chosen)
            # A target step takes twice as long at 256 tokens as at one: an assumption, as in studies/05-scale.
            layout = layout_of(pair, batch, pair.c / 256)
            plan.add("batch", (label, batch), pair, method, num_seeds=2, layout=layout)


def add_theorem(plan: Plan) -> None:
    for name in (WEAK, "llama3-8b-70b"):
        for gamma in range(1, 13):
            pair = replace(PAIRS[name], gamma=gamma, c=PAIRS[name].c)
            plan.add("theorem", (name, gamma), pair, method_for("pearl", pair))


def labelled(pair: ModelPair, label: str, chosen: dict[str, Any]) -> tuple[ModelPair, Method]:
    if label.startswith("specbranch"):
        return pair, paper_form(pair, label.removeprefix("specbranch, "), chosen)
    return pair, method_for(label, pair)


def theorem_speed(acceptance: float, gamma: int, c: float) -> float:
    """Theorem 1 of the paper as a speed over plain decoding: c over the time of a token, in draft steps."""
    emitted = (1 + acceptance**gamma) * acceptance * (1 - acceptance**gamma) / (1 - acceptance)
    return c * emitted / (2 * max(gamma, c))


def accepted_lengths(window: int = 8) -> list[dict[str, Any]]:
    """How many of a window's tokens a greedy draft gets right, from each position of recorded answers of a real pair."""
    found = []
    for path in sorted(ROOT.glob("traces/*.gz")):
        trace = read_trace(path)
        lengths = [min(run, window) for answer in trace.answers for run in answer.runs()[: -window or None]]
        acceptance = trace.match_share()
        found.append(
            {
                "trace": path.name.removesuffix(".jsonl.gz"),
                "acceptance": acceptance,
                "measured": [lengths.count(length) / len(lengths) for length in range(window + 1)],
                "geometric": [(1 - acceptance) * acceptance**length for length in range(window)] + [acceptance**window],
            }
        )
    return found


def merged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the means over seeds, and the standard deviation of the speed between them."""
    mean = {key: statistics.mean(row[key] for row in rows) for key in rows[0] if key != "energy"}
    mean["energy"] = {power: statistics.mean(row["energy"][power] for row in rows) for power in rows[0]["energy"]}
    mean["speed_sd"] = statistics.stdev(row["speed"] for row in rows) if len(rows) > 1 else None
    return mean


def measure(num_seeds: int, num_tokens: int) -> Iterator[tuple[str, Any]]:
    """Yield the sections of the result."""
    with ProcessPoolExecutor(2) as pool, Progress(transient=True) as bar:
        chosen = choose(pool)
        yield "chosen", chosen
        settings = {key: chosen[key] for key in ("confidence", "max_branches")}
        plan = Plan(num_seeds, num_tokens)
        add_pairs(plan, settings)
        add_cells(plan, settings)
        add_sweeps(plan, settings)
        add_theorem(plan)
        cases = sorted(plan.cases, key=lambda case: (case.pair.name, case.pair.acceptance, case.seed))
        task, grouped = bar.add_task("simulating", total=len(cases)), dict[tuple[str, tuple[Any, ...]], list[Any]]()
        for case, figures in zip(cases, pool.map(simulated, cases, chunksize=4), strict=True):
            grouped.setdefault((case.section, case.key), []).append(figures)
            bar.advance(task)
    sections: dict[str, list[dict[str, Any]]] = {}
    for (section, key), rows in sorted(grouped.items(), key=lambda one: str(one[0])):
        sections.setdefault(section, []).append({"key": list(key), **merged(rows)})
    yield from sections.items()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed and 1,000 tokens of each trace")
    args = parser.parse_args()
    num_seeds, num_tokens = (1, 1000) if args.quick else (5, 4000)
    document: dict[str, Any] = {
        "seeds": num_seeds,
        "tokens": num_tokens,
        "published": {"cells": CELLS, "averages": AVERAGES},
        "pairs_at": {
            pair.name: {"c": pair.c, "gamma": pair.gamma, "acceptance": pair.acceptance, "row_cost": pair.row_cost}
            for pair in PAIRS.values()
        },
        "lengths": accepted_lengths(),
    }
    document |= dict(measure(num_seeds, num_tokens))
    for row in document["theorem"]:
        pair = PAIRS[row["key"][0]]
        row["theorem"] = theorem_speed(pair.acceptance, row["key"][1], pair.c)
        row["chain"] = pearl_speed(pair.acceptance, row["key"][1], pair.c)
    document["provenance"] = provenance()
    out = ROOT / "build" / "paper-quick.json" if args.quick else HERE / "result.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {out.relative_to(ROOT)}")
    if not args.quick:
        subprocess.run([sys.executable, str(HERE / "page.py")], check=True)


if __name__ == "__main__":
    main()
