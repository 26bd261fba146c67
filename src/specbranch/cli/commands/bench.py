"""`specbranch bench`: run a scenario on real engines, and show its results."""

from __future__ import annotations

import errno
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from specbranch.bench.load import run_load
from specbranch.bench.report import SAME, load_table, lost_lines, write_report
from specbranch.bench.results import NO_RANGE, Line, ResultError, Results, drop_unfinished, read_results, summarize
from specbranch.bench.runner import run_scenario
from specbranch.bench.scenario import BARE, Scenario, check_methods, read_scenario
from specbranch.cli.console import ProgressBar, console_for, friendly_errors, print_help_alone, print_json
from specbranch.cli.options import AsJson, example
from specbranch.cli.preflight import Preflight
from specbranch.core.planners import DEFAULT_PLANNER
from specbranch.errors import SpecBranchError
from specbranch.machine import commit_note

_COLUMNS = ("method", "n", "tok/s", "speed", "range", "core", "emit", "hits", "lost", "hook", "same")
_LEGEND = (
    f"n: trials; speed: tokens/s relative to vLLM without drafts; range: 95 % of resamples of the prompts, {NO_RANGE} "
    "below three trials; core: speed for each CPU core that the method uses; emit: tokens per round; hits: "
    "verification results with a prepared branch; lost: discarded draft tokens per emitted token; hook: ms of "
    "the proposer's call.",
    SAME,
)

bench = typer.Typer(
    invoke_without_command=True, help="Measure methods against each other in vLLM, and report the results."
)
bench.callback()(print_help_alone)
_RESULTS = typer.Argument(metavar="FILE", help="Result file of `specbranch bench run`.", show_default=False)


@bench.command(epilog=example("specbranch bench run benchmarks/equal.toml --data prompts --out r.jsonl"))
def run(
    scenario: Annotated[
        Path, typer.Argument(metavar="SCENARIO", help="TOML file that says what to measure.", show_default=False)
    ],
    data: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Directory of the prompt files that the scenario names.", show_default=False),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="Result file, in JSON lines; must not exist.", show_default=False)
    ],
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted run from its result file.")] = False,
) -> None:
    """Measure every method of a scenario and write a result file.

    Nothing else should run on the machine meanwhile.
    """
    with friendly_errors(SpecBranchError, OSError):
        chosen = read_scenario(scenario)
        num_done = _num_done(chosen, out) if resume else 0
        if out.exists() and not resume:
            raise FileExistsError(errno.EEXIST, "File exists", str(out))
        chosen.check()
        preflight(chosen).run()
        check_methods(chosen)
        with out.open("a" if resume else "x") as sink, ProgressBar() as progress:
            progress.show("starting engines")
            measure = run_scenario if chosen.served is None else run_load
            measure(chosen, data, sink, partial(progress.show, f"measuring {chosen.name}"), num_done, progress.show)
        _print(out, as_json=False)


@bench.command(epilog=example("specbranch bench show benchmarks/planners.jsonl"))
def show(results: Annotated[Path, _RESULTS], as_json: AsJson = False) -> None:
    """Show the speed of every method relative to vLLM without drafts, as a table."""
    with friendly_errors(ResultError):
        _print(results, as_json)


@bench.command(epilog=example("specbranch bench report benchmarks/planners.jsonl --out report"))
def report(
    results: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="Result files; each becomes a section.", show_default=False),
    ],
    out: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Directory for report.html, report.md and the figures.", show_default=False),
    ],
    method: Annotated[str, typer.Option(metavar="NAME", help="Method whose losses are listed.")] = DEFAULT_PLANNER,
    title: Annotated[str, typer.Option(metavar="TEXT", help="Title of the report.")] = "Benchmark",
) -> None:
    """Write a report with tables, figures, and the cases where other methods are faster than --method.

    Writes Markdown, and one HTML page that needs no other files; also prints the tables.
    """
    with friendly_errors(ResultError, ImportError, OSError):
        read = [read_results(path) for path in results]
        page = write_report(read, out, method, title)
        console = console_for(as_json=False)
        for one in read:
            _print_table(console, one)
            if one.scenario.served is not None:
                continue
            lost = lost_lines(one, method)
            console.print(f"where {method} loses: " + ("nowhere in this run" if not lost else ""), style="bold")
            for line in lost:
                console.print(f"  {line}", highlight=False, soft_wrap=True)
        console.print(f"wrote {page} and report.md beside it", highlight=False, soft_wrap=True)


def preflight(scenario: Scenario) -> Preflight:
    """Return the checks of a scenario to run before any model is loaded."""
    engine = {"dtype": scenario.dtype, "max_model_len": scenario.max_model_len, **scenario.arguments}
    cores = scenario.target_cores or None
    return Preflight(target=scenario.target, draft=scenario.draft_options(), arguments=engine, target_cores=cores)


def _num_done(scenario: Scenario, path: Path) -> int:
    """Return how many trials a result file already holds, after removing an incomplete last line from the file.

    Raise `ResultError`, and leave the file as it is, if its trials are of another scenario.
    """
    results = read_results(path)
    if results.scenario != scenario:
        raise ResultError(f"{path} holds results of another scenario, or of an older version of it; choose a new --out")
    drop_unfinished(path)  # not before the check: the file of another scenario must not change
    return len(results.records)


def _print(path: Path, as_json: bool) -> None:
    results = read_results(path)
    if not as_json:
        _print_table(console_for(as_json), results)
    elif results.scenario.served is None:
        lines = [line.as_json() for line in summarize(results)]
        print_json({"scenario": results.scenario.as_json(), "lines": lines})
    else:
        print_json({"scenario": results.scenario.as_json(), "records": list(results.records)})


def _print_table(console: Console, results: Results) -> None:
    console.print(results.scenario.name, style="bold", highlight=False)
    if note := commit_note(results.provenance):
        console.print(note, style="yellow", highlight=False)
    if results.scenario.served is not None:
        console.print(_load_table(results))
        return
    for (task, concurrency), lines in groupby(summarize(results), key=lambda line: (line.task, line.concurrency)):
        at_once = "" if concurrency == 1 else f", {concurrency} requests at once"
        console.print(_speed_table(f"{task}{at_once}", list(lines)))
    for line in _LEGEND:
        console.print(line, style="dim", highlight=False)


def _load_table(results: Results) -> Table:
    read = load_table(results)
    table = Table(title=read.title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for head in read.heads:
        table.add_column(
            head, justify="left" if head == "method" else "right", overflow="fold", no_wrap=head == "method"
        )
    for row in read.rows:
        table.add_row(*row)
    return table


def _speed_table(title: str, lines: list[Line]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    fastest = max(lines, key=lambda line: line.speed.value)
    for line in lines:
        cells = (
            line.method,
            str(line.trials),
            f"{line.tokens_per_s:.1f}",
            f"{line.speed.value:.2f}",
            "" if line.method == BARE else line.speed.range,
            f"{line.speed_per_core:.2f}",
            f"{line.emitted_per_round:.2f}",
            _optional(line.hit_rate, ".0%"),
            _optional(line.lost, ".2f"),
            _optional(line.hook_ms, ".1f"),
            f"{line.same_as_bare:.0%}",
        )
        table.add_row(*cells, style="bold" if line is fastest else None)
    return table


def _optional(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
