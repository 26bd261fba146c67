#!/usr/bin/env python3
"""Write docs/dev/benchmarks.md from the result files in this directory and in studies/.

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
from specbranch.bench.report import load_table, same_note
from specbranch.bench.results import (
    NO_RANGE,
    Cell,
    Line,
    Ratio,
    Record,
    Results,
    cells,
    compare,
    losses,
    mean_ratio,
    read_results,
    summarize,
)
from specbranch.bench.scenario import BARE
from specbranch.machine import commit_note

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PAGE = ROOT / "docs" / "dev" / "benchmarks.md"
SUBJECT = "budget"


@dataclass(frozen=True)
class Run:
    """A result file of a directory, and what its section says before the table."""

    name: str
    title: str
    text: str
    figure: str = ""
    directory: str = "benchmarks"

    @property
    def path(self) -> Path:
        """The result file."""
        return ROOT / self.directory / f"{self.name}.jsonl"


RUNS = (
    Run(
        "equal",
        "Equal hardware: four ways to use the same two cores, without AMX",
        "What somebody with two cores would take. The target is an int8 checkpoint of `specbranch quantize`, the fastest type on "
        "this CPU. `budget` is as `specbranch serve TARGET --draft DRAFT` runs it there: target and draft take turns on both cores. "
        "`text` is `specbranch serve TARGET`, without a draft model. `suffix` is at the best setting that we found (next table). Eight "
        "prompts of each task once; each engine answers eight before the next. Edits and turns are repeated traffic "
        "(`benchmarks/repeated.py`).",
        "img/equal.svg",
    ),
    Run(
        "suffix",
        "Text drafts beside suffix decoding with two settings, without AMX",
        "vLLM's `suffix` with its default, which drafts at most as many tokens as the match has, and with twice as many. Four "
        "prompts of each task; otherwise as above.",
    ),
    Run(
        "own-core",
        "A core that the target cannot use, without AMX",
        "Every method has the same one core for its target; `budget` has its draft on another, as with `--target-cores 0 "
        "--draft-cores 1`, and both work at once. Three prompts of each task; each engine answers six before the next.",
    ),
    Run(
        "at-once",
        "Four and sixteen requests at once on the same two cores, without AMX",
        "The pair and the methods of the first table. Two groups of each size and task, so these figures are rough; each engine answers two "
        "groups before the next. A draft model that shares the cores makes all requests wait, so it does not pay here. Text drafts do at four "
        "requests, and cost little at sixteen.",
    ),
    Run(
        "not-flat",
        "A target whose verification is not flat",
        "bfloat16 on a CPU that only emulates it: a step with one draft token costs about as much as three plain steps. `budget` "
        "learns that and submits long drafts or none; a fixed length loses. Three prompts of each task. Memory holds one engine "
        "at a time, so bare vLLM answers all prompts first.",
    ),
    Run(
        "sampled",
        "Sampled text, at temperature 1, without AMX",
        "The flagship pair in float32, four prompts of each task, 64 tokens. Rule A proposes the likeliest tokens; with "
        "[rule B](../exactness.md#sampling) they are drawn by chance and vLLM tests them by their probabilities. Both "
        "take turns prompt by prompt; memory holds one engine at a time, so bare vLLM answers eight prompts before them. Every answer "
        "is another text, so a task of four prompts varies much. Rule B was then deleted on the V1 runner, which this is.",
        directory="studies/09-sampled",
    ),
    Run(
        "sampled-sharp",
        "Sampled text, at temperature 0.7 with top-p 0.9, without AMX",
        "As above, with sharper distributions: the likeliest token is more often right, and drawing it gains less.",
        directory="studies/09-sampled",
    ),
    Run(
        "lengths",
        "One to sixteen requests at once, without AMX",
        "`budget` beside a fixed length without prices, both without the gate. They take turns; bare vLLM answers eight groups in a "
        "turn of its own. Three groups at each load, 32 tokens.",
    ),
    Run(
        "planners",
        "Every planner, four tasks",
        "Three prompts of each task, methods interleaved prompt by prompt. Our planners have two cores, one for the target and one "
        "for the draft; bare vLLM has one of them.",
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
        "served-small",
        "Real servers under load, a small pair without AMX",
        "The same, with 32 requests at each rate. The gate is on. A server keeps its past answers, and answers the same prompts at "
        "both rates, so that the second rate of each repeat has more accepted tokens; the time to the first token does not profit from "
        "that. Its median was 312, 279 and 456 ms with drafts in the three repeats and 318, 298 and 303 ms without at 0.5 requests "
        "a second, and 376, 331 and 789 ms, without 338, 333 and 340 ms, at 1.2.",
    ),
    Run(
        "weak",
        "A badly aligned pair",
        "The draft without 6 of its 24 layers ([study](../../studies/03-hrad/README.md#a-badly-aligned-pair-in-vllm)). Two prompts of each task.",
    ),
    Run(
        "weak-hrad",
        "A badly aligned pair with H-RAD, without AMX",
        "The same pair with H-RAD trained for it ([study](../../studies/03-hrad/README.md#a-badly-aligned-pair-in-vllm)), on four other "
        "prompts of each task, 24 tokens. Our methods take turns; bare vLLM answers all first.",
    ),
)
INTRO = f"""# Benchmarks

Written by `benchmarks/make_page.py` from the result files that each section names; do not edit.
[How it is measured](../benchmark.md). To repeat a run: `specbranch bench run benchmarks/NAME.toml --data DIR --out FILE`.
The first line of every result file has its scenario; a run that a later one replaced has no file NAME.toml any more.

Everything ran on two cores of one CPU, without a GPU. The machine is shared, and its speed changes by up to a factor
of two from hour to hour. Only ratios within one run count. All runs but one are greedy.

- Columns named after a task, and *mean*: tokens per second from request to last token, over bare vLLM in the same run.
  The mean is geometric. In brackets: 95 % of resamples of the prompts; {NO_RANGE} below three prompts a task, too few
  for a range.
- *budget over it*: the same ratio between our planner `budget` and the method of the row; below 1 we lose.
- *per core*: the mean divided by the cores that a method keeps, the draft's core included.
- *first token s*: mean time to first token, in seconds; with several requests at once, of the last of them.
- *hits*: verdicts for which the draft was ready. *rejected*, *unused*: drafted tokens rolled back per emitted token.
- *hook ms*: the time of the proposer's call in a step, waiting for drafts included.
- *same*: answers equal to bare vLLM's, token by token. In bfloat16 a batch of another shape rounds differently, so
  near-ties swap with every method alike, vLLM's own included. The output distribution does not change. In float32
  such swaps are very rare ([check](../check.md)).
- *No clean commit*: the file does not name a commit that holds all of the code that made it
  ([list](#result-files-without-a-clean-commit))."""


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
            draw_figures(read_results(run.path), args.figures, f"bench-{run.name}")


def make_page() -> str:
    return "\n\n".join([INTRO, *(_section(run) for run in RUNS), _forecasts(), _unclean()]) + "\n"


def _section(run: Run) -> str:
    results = read_results(run.path)
    parts = [f"## {run.title}", textwrap.fill(run.text, 120), _facts(run, results), *_notes(results)]
    if results.scenario.served is not None:
        table = load_table(results)
        parts.append(_table(table.heads, table.rows))
    elif len(results.scenario.concurrency) > 1:
        parts.append(_by_load(results))
    else:
        parts.append(_by_task(results))
    if run.figure:
        parts.append(f"![Speeds of the methods; lines: 95 % of resamples of the prompts](../{run.figure})")
    if lost := _lost(results):
        parts.append(f"Where `{SUBJECT}` loses:\n\n{lost}")
    return "\n\n".join(parts)


def _notes(results: Results) -> list[str]:
    """What must be read with the table: where the file has no clean commit, and why answers differ."""
    lines = summarize(results) if results.scenario.served is None else []
    notes = (commit_note(results.provenance), same_note(results.scenario, lines))
    return [_bold_head(note) for note in notes if note]


def _bold_head(note: str) -> str:
    head, _, text = note.partition(":")
    return textwrap.fill(f"**{head}:**{text}", 118)


def _facts(run: Run, results: Results) -> str:
    scenario, source = results.scenario, results.provenance
    path = run.path.relative_to(ROOT)
    vllm = f"vLLM {source['vllm']}, " if "vllm" in source else ""
    draft = (
        f", draft {scenario.draft}" if any(method.planner not in (None, "none") for method in scenario.methods) else ""
    )
    return (
        f"Target {scenario.target} in {scenario.dtype}{draft}; temperature {scenario.temperature:g}, "
        f"at most {scenario.max_tokens} tokens.\n[`{path}`](../../{path}), {vllm}commit {source['commit']}."
    )


def _by_task(results: Results) -> str:
    """A row for each method, a column for each task."""
    by_cell = cells(results)
    lines = summarize(results)
    tasks = [task for task, _ in by_cell]
    has_subject = all(SUBJECT in methods for methods in by_cell.values())
    heads = ["method", "cores", *tasks, *(["mean"] if len(tasks) > 1 else []), *([f"{SUBJECT} over it"] * has_subject)]
    heads += ["per core", "first token s", "hits", "rejected", "unused", "hook ms", "same"]
    rows = []
    for name in next(iter(by_cell.values())):
        own = [line for line in lines if line.method == name]
        pairs = _pairs(by_cell, name, BARE)
        mean = mean_ratio(pairs)
        row = [name, str(own[0].cores), *(_speed(name, compare(*pair)) for pair in pairs)]
        row += [_speed(name, mean)] * (len(tasks) > 1)
        if has_subject:
            over = _pairs(by_cell, SUBJECT, name)
            row.append("" if name == SUBJECT else _ratio(mean_ratio(over)))
        bare_cores = results.scenario.num_cores(results.method(BARE))
        rows.append([*row, f"{mean.value * bare_cores / own[0].cores:.2f}", *_means(own)])
    return _table(heads, rows)


def _by_load(results: Results) -> str:
    """A row for each task, number of requests at once, and method."""
    rows = []
    for line in summarize(results):
        first = [line.task, str(line.concurrency), line.method, str(line.cores), _speed(line.method, line.speed)]
        rows.append([*first, f"{line.speed_per_core:.2f}", *_means([line])])
    heads = (
        "task",
        "at once",
        "method",
        "cores",
        "over bare",
        "per core",
        "first token s",
        "hits",
        "rejected",
        "unused",
        "hook ms",
        "same",
    )
    return _table(heads, rows)


def _means(lines: Sequence[Line]) -> list[str]:
    """First token, hits, rejected, unused, hook time and equal answers, each as the mean over the tasks that have it."""
    lost = [line.rolled_back or {} for line in lines]
    return [
        _mean([line.first_s for line in lines], ".1f"),
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


def _speed(method: str, ratio: Ratio) -> str:
    """A speed over bare vLLM; that of bare vLLM itself is 1 by definition."""
    return f"{ratio.value:.2f}" if method == BARE else _ratio(ratio)


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.value:.2f} ({ratio.range})"


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
    study = ROOT / "studies" / "06-forecast"
    found = json.loads((study / "result.json").read_text())
    text = (
        f"The simulator on recorded traces, with the step times of the run itself, against {len(found['rows'])} measured "
        f"speeds: median error {found['median_error']:.0%}, worst {found['worst_error']:.0%}. With the step times of "
        f"`specbranch plan`: median {found['median_planned_error']:.0%}, worst {found['worst_planned_error']:.0%} "
        "([study](../../studies/06-forecast/README.md))."
    )
    parts = ["## Forecasts against these runs", textwrap.fill(text, 118)]
    return "\n\n".join([*parts, *_file_notes(study / "result.json", study / "plan.json")])


def _unclean() -> str:
    """Every result file of the repository that has no clean commit."""
    paths = sorted(path for folder in ("benchmarks", "studies") for path in (ROOT / folder).rglob("*.json*"))
    rows = [
        [f"[`{path.relative_to(ROOT)}`](../../{path.relative_to(ROOT)})", note.partition(": ")[2]]
        for path in paths
        if (note := commit_note(read_source(path)))
    ]
    text = "All other result files in `benchmarks/` and `studies/` name a commit without later changes."
    return "\n\n".join(["## Result files without a clean commit", text, _table(("file", "why"), rows)])


def _file_notes(*paths: Path) -> list[str]:
    """A note for each of these files that has no clean commit."""
    notes = ((path, commit_note(read_source(path))) for path in paths)
    return [_bold_head(f"{note} (`{path.relative_to(ROOT)}`)") for path, note in notes if note]


def read_source(path: Path) -> dict[str, Any]:
    """The provenance in a result file; empty where it has none. In JSON lines the first one holds it."""
    text = path.read_text()
    document = json.loads(text.partition("\n")[0] if path.suffix == ".jsonl" else text)
    return document.get("provenance", {})


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()
