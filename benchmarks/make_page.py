#!/usr/bin/env python3
"""Write docs/benchmarks.md from the result files in this directory and in studies/.

`--text` prints the page instead; `--figures DIR` draws the figures of every run into a directory of your own.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbranch.bench.figures import draw_figures
from specbranch.bench.report import load_table
from specbranch.bench.results import Record, Results, read_results
from specbranch.bench.scenario import BARE
from specbranch.bench.summary import Cell, Line, Ratio, cells, compare, losses, mean_ratio, summarize

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PAGE = ROOT / "docs" / "benchmarks.md"
SUBJECT = "budget"
LEAST_TRIALS = 3  # a range over fewer prompts would only look like one


@dataclass(frozen=True)
class Run:
    """A result file of this directory, and what its section says before the table."""

    name: str
    title: str
    text: str
    figure: str = ""


RUNS = (
    Run(
        "planners",
        "Every planner, four tasks",
        "Three prompts of each task, methods interleaved prompt by prompt. This is the run of the headline.",
        "img/bench-planners-speed.svg",
    ),
    Run(
        "duel",
        "Against vLLM's suffix decoding on the same two cores",
        "`suffix` uses both cores for the target. Two prompts of each task, in turns.",
    ),
    Run("duel-2", "The same again, at another hour", "The same scenario. The difference is the noise of the machine."),
    Run(
        "flagship-load",
        "Several requests at once",
        "Two groups of requests at each load. The gate is off, so drafts are always used.",
    ),
    Run(
        "served-flagship",
        "Real servers under load",
        "`specbranch serve` with the gate on, against `specbranch serve --bare`. The load is `vllm bench serve`.",
    ),
    Run(
        "weak",
        "A badly aligned pair",
        "The draft without 6 of its 24 layers ([study](../studies/01-weak-pair/README.md)). Two prompts of each task.",
    ),
    Run(
        "small",
        "A small pair, eight tasks",
        "SmolLM2-135M with its own 4-bit GGUF as draft. One or two prompts of each task: read only the mean.",
    ),
    Run(
        "off",
        "The plugin installed, drafting off",
        "Planner `none` against bare vLLM. The range includes 1.00; a cost of 1 % could not be seen here.",
    ),
)
INTRO = """# Benchmarks

Written by `benchmarks/make_page.py` from the result files that each section names; do not edit.
[How it is measured](bench.md). To repeat a run: `specbranch bench run benchmarks/NAME.toml --data DIR --out FILE`.

Everything ran on two cores of one CPU, without a GPU. The machine is shared, and its speed changes by up to a factor
of two from hour to hour. Only ratios within one run count. All runs are greedy: at temperature 1 we have too few prompts
to claim anything ([log](log.md#measuring)).

- Columns named after a task, and *mean*: tokens per second from request to last token, over bare vLLM in the same run.
  The mean is geometric. In brackets: 95 % of resamples of the prompts; not given below three prompts a task.
- *budget over it*: the same ratio between our planner `budget` and the method of the row; below 1 we lose.
- *per core*: the mean divided by the cores that a method keeps, the draft's core included.
- *hits*: verdicts for which the draft was ready. *rejected*, *unused*: drafted tokens rolled back per emitted token.
- *hook ms*: the time of the proposer's call in a step, waiting for drafts included.
- *same*: answers equal to bare vLLM's, token by token. In bfloat16 a batch of another shape rounds differently, so
  near-ties flip with every method that verifies several tokens at once. In float32 all are equal ([check](check.md))."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", action="store_true", help="print the page and write nothing")
    parser.add_argument("--figures", type=Path, help="directory for the figures of all runs")
    args = parser.parse_args()
    page = make_page()
    if args.text:
        print(page, end="")
    else:
        PAGE.write_text(page)
    if args.figures:
        args.figures.mkdir(parents=True, exist_ok=True)
        for run in RUNS:
            draw_figures(read_results(HERE / f"{run.name}.jsonl"), args.figures, f"bench-{run.name}")


def make_page() -> str:
    return "\n\n".join([INTRO, *(_section(run) for run in RUNS), _forecasts(), _published()]) + "\n"


def _section(run: Run) -> str:
    results = read_results(HERE / f"{run.name}.jsonl")
    parts = [f"## {run.title}", run.text, _facts(results)]
    if results.scenario.served is not None:
        table = load_table(results)
        parts.append(_table(table.heads, table.rows))
    elif len(results.scenario.concurrency) > 1:
        parts.append(_by_load(results))
    else:
        parts.append(_by_task(results))
    if run.figure:
        parts.append(f"![Speed over bare vLLM; whiskers: 95 % of resamples of the prompts]({run.figure})")
    if lost := _lost(results):
        parts.append(f"Where `{SUBJECT}` loses:\n\n{lost}")
    return "\n\n".join(parts)


def _facts(results: Results) -> str:
    scenario, source = results.scenario, results.provenance
    path = f"benchmarks/{results.name}"
    vllm = f"vLLM {source['vllm']}, " if "vllm" in source else ""
    draft = (
        f", draft {scenario.draft}" if any(method.planner not in (None, "none") for method in scenario.methods) else ""
    )
    return (
        f"Target {scenario.target} in {scenario.dtype}{draft}; temperature {scenario.temperature:g}, "
        f"at most {scenario.max_tokens} tokens.\n[`{path}`](../{path}), {vllm}commit {source['commit']}."
    )


def _by_task(results: Results) -> str:
    """A row for each method, a column for each task."""
    by_cell = cells(results)
    lines = summarize(results)
    tasks = [task for task, _ in by_cell]
    has_subject = all(SUBJECT in methods for methods in by_cell.values())
    heads = ["method", "cores", *tasks, *(["mean"] if len(tasks) > 1 else []), *([f"{SUBJECT} over it"] * has_subject)]
    heads += ["per core", "hits", "rejected", "unused", "hook ms", "same"]
    rows = []
    for name in next(iter(by_cell.values())):
        own = [line for line in lines if line.method == name]
        pairs = _pairs(by_cell, name, BARE)
        mean = mean_ratio(pairs)
        row = [name, str(own[0].cores), *(_ratio(compare(*pair), len(pair[0])) for pair in pairs)]
        row += [_ratio(mean, _trials(pairs))] * (len(tasks) > 1)
        if has_subject:
            over = _pairs(by_cell, SUBJECT, name)
            row.append("" if name == SUBJECT else _ratio(mean_ratio(over), _trials(over)))
        bare_cores = results.scenario.num_cores(results.method(BARE))
        rows.append([*row, f"{mean.value * bare_cores / own[0].cores:.2f}", *_means(own)])
    return _table(heads, rows)


def _by_load(results: Results) -> str:
    """A row for each method and number of requests at once."""
    by_cell = cells(results)
    rows = []
    for line in summarize(results):
        bare = by_cell[line.task, line.concurrency][BARE]
        first = [str(line.concurrency), line.method, str(line.cores), _ratio(line.speed, len(bare))]
        rows.append([*first, f"{line.speed_per_core:.2f}", *_means([line])])
    heads = ("at once", "method", "cores", "over bare", "per core", "hits", "rejected", "unused", "hook ms", "same")
    return _table(heads, rows)


def _means(lines: Sequence[Line]) -> list[str]:
    """Hits, rejected, unused, hook time and equal answers, each as the mean over the tasks that have it."""
    lost = [line.rolled_back or {} for line in lines]
    return [
        _mean([line.hit_rate for line in lines], ".2f"),
        *(_mean([one.get(cause) for one in lost], ".2f") for cause in ("rejected", "unused")),
        _mean([line.hook_ms for line in lines], ".1f"),
        _mean([line.same_as_bare for line in lines], ".0%"),
    ]


def _mean(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return format(sum(known) / len(known), form) if known else ""


def _pairs(by_cell: Mapping[Cell, Mapping[str, list[Record]]], own: str, other: str) -> list[tuple[Any, Any]]:
    return [(methods[own], methods[other]) for methods in by_cell.values()]


def _trials(pairs: Sequence[tuple[Any, Any]]) -> int:
    """Prompts of the task that has the fewest."""
    return min(len(own) for own, _ in pairs)


def _ratio(ratio: Ratio, trials: int) -> str:
    is_itself = ratio.low == ratio.high == 1.0
    spread = "" if trials < LEAST_TRIALS or is_itself else f" ({ratio.low:.2f}-{ratio.high:.2f})"
    return f"{ratio.value:.2f}{spread}"


def _lost(results: Results) -> str:
    """One line for each method that is ahead somewhere; where only the cores decide, the line says so."""
    if results.scenario.served is not None:
        return ""
    ahead: dict[str, list[str]] = {}
    for loss in losses(results, SUBJECT):
        where = f"{loss.concurrency} at once" if len(results.scenario.concurrency) > 1 else loss.task
        name = f"{loss.other}, per core" if loss.is_per_core else loss.other
        ahead.setdefault(name, []).append(f"{where} {loss.ahead.value:.2f}")
    return "\n".join(f"- {name}: {', '.join(cells_lost)}" for name, cells_lost in ahead.items())


def _forecasts() -> str:
    found = json.loads((ROOT / "studies" / "06-forecast" / "result.json").read_text())
    text = (
        f"The simulator on recorded traces, with the step times of the run itself, against {len(found['rows'])} measured "
        f"speeds: median error {found['median_error']:.0%}, worst {found['worst_error']:.0%}. With the step times of "
        f"`specbranch plan`: median {found['median_planned_error']:.0%}, worst {found['worst_planned_error']:.0%} "
        "([study](../studies/06-forecast/README.md))."
    )
    return f"## Forecasts against these runs\n\n{textwrap.fill(text, 118)}"


def _published() -> str:
    found = json.loads((ROOT / "studies" / "05-scale" / "result.json").read_text())
    rows = [
        [row["pair"], *(f"{row[name]:.2f}" for name in ("pearl", "specbranch", "published_specbranch"))]
        for row in found["published"]
    ]
    heads = ("pair", "PEARL, simulated", "SpecBranch, simulated", "SpecBranch, published")
    text = (
        "Acceptance is solved from PEARL's published speed, so only SpecBranch's speed is a forecast "
        "([study](../studies/05-scale/README.md))."
    )
    return f"## The simulator against the paper\n\n{textwrap.fill(text, 118)}\n\n{_table(heads, rows)}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()
