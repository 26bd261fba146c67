"""`specbranch bench`: run a scenario on real engines, and show what its results say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from specbranch.bench.prompts import PromptError
from specbranch.bench.report import load_table, lost_lines, write_report
from specbranch.bench.results import ResultError, Results, drop_unfinished, read_results
from specbranch.bench.runner import run_scenario
from specbranch.bench.scenario import Scenario, ScenarioError, read_scenario
from specbranch.bench.served import LoadError, run_load
from specbranch.bench.summary import Line, summarize
from specbranch.cli.console import console_for, friendly_errors, print_json, progress_bar
from specbranch.core.planners import SettingError
from specbranch.plugins.vllm.process import TargetFailure
from specbranch.service.process import StartError

_COLUMNS = (
    "task", "at", "method", "n", "tok/s", "speed", "range", "core", "emit", "hits", "lost", "hook", "same"
)  # fmt: skip
_CAPTION = (
    "at: requests at once; n: trials; speed: tokens per second over bare vLLM, range: 95 % of resamples; core: speed "
    "for each core that the method keeps; emit: tokens a round; lost: rolled back per emitted token; hook: ms of the "
    "proposer's call; same: answers equal to bare vLLM's"
)

bench = typer.Typer(no_args_is_help=True, help="Measure methods against each other on real engines.")


@bench.command()
def run(
    scenario: Annotated[Path, typer.Argument(help="TOML file that says what to measure.")],
    data: Annotated[Path, typer.Option(help="Directory with the files of prompts that the scenario names.")],
    out: Annotated[Path, typer.Option(help="Result file, one JSON document a line; must not exist.")],
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a result file that was cut off.")] = False,
) -> None:
    """Start the engines on their cores and measure; nothing else should run on the machine meanwhile."""
    with friendly_errors(
        ScenarioError, SettingError, PromptError, ResultError, TargetFailure, StartError, LoadError, OSError
    ):
        chosen = read_scenario(scenario)
        num_done = _num_done(chosen, out) if resume else 0
        with out.open("a" if resume else "x") as sink, progress_bar() as bar:
            task = bar.add_task("starting engines", total=None)
            measure = run_scenario if chosen.served is None else run_load
            measure(
                chosen,
                data,
                sink,
                lambda done, total: bar.update(task, completed=done, total=total, description=chosen.name),
                num_done,
            )
        _print(out, as_json=False)


@bench.command()
def show(
    results: Annotated[Path, typer.Argument(help="A result file.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document as the last line of stdout.")] = False,
) -> None:
    """Tokens per second of every method over bare vLLM, with the spread over prompts."""
    with friendly_errors(ResultError):
        _print(results, as_json)


@bench.command()
def report(
    results: Annotated[list[Path], typer.Argument(help="Result files; each is a section.")],
    out: Annotated[Path, typer.Option(help="Directory for report.md, report.html and the figures.")],
    method: Annotated[str, typer.Option(help="The method whose losses are told.")] = "specbranch",
    title: Annotated[str, typer.Option(help="Heading of the report.")] = "Benchmark",
) -> None:
    """Tables with ranges, figures, and where we lose: Markdown, and one HTML page that needs nothing beside it."""
    with friendly_errors(ResultError, ImportError, OSError):
        read = [read_results(path) for path in results]
        page = write_report(read, out, method, title)
        console = console_for(as_json=False)
        for one in read:
            console.print(_table(one))
            if one.scenario.served is not None:
                continue
            lost = lost_lines(one, method)
            console.print(f"where {method} loses: " + ("nowhere in this run" if not lost else ""), style="bold")
            for line in lost:
                console.print(f"  {line}", highlight=False)
        console.print(f"written: {page} and report.md beside it", highlight=False)


def _num_done(scenario: Scenario, path: Path) -> int:
    """Trials that a result file already holds; it must be of the same scenario."""
    results = read_results(path)
    if results.scenario != scenario:
        raise ResultError(f"{path} holds results of another scenario, or of another state of it; begin a new file")
    drop_unfinished(path)  # only now: a file of something else is left as it is
    return len(results.records)


def _print(path: Path, as_json: bool) -> None:
    results = read_results(path)
    if not as_json:
        console_for(as_json).print(_table(results))
    elif results.scenario.served is None:
        lines = [line.as_json() for line in summarize(results)]
        print_json({"scenario": results.scenario.as_json(), "lines": lines})
    else:
        print_json({"scenario": results.scenario.as_json(), "records": list(results.records)})


def _table(results: Results) -> Table:
    if results.scenario.served is None:
        return _speed_table(results.scenario.name, summarize(results))
    said = load_table(results)
    table = Table(*said.heads, title=results.scenario.name, caption=said.title, box=None, padding=(0, 1, 0, 0))
    for row in said.rows:
        table.add_row(*row)
    return table


def _speed_table(name: str, lines: list[Line]) -> Table:
    table = Table(title=name, caption=_CAPTION, box=None, padding=(0, 1, 0, 0))
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in ("task", "method") else "right", no_wrap=True)
    for line in lines:
        table.add_row(
            line.task,
            str(line.concurrency),
            line.method,
            str(line.trials),
            f"{line.tokens_per_s:.1f}",
            f"{line.speed.value:.2f}",
            f"{line.speed.low:.2f}-{line.speed.high:.2f}",
            f"{line.speed_per_core:.2f}",
            f"{line.emitted_per_round:.2f}",
            _optional(line.hit_rate, ".0%"),
            _optional(line.lost, ".2f"),
            _optional(line.hook_ms, ".1f"),
            f"{line.same_as_bare:.0%}",
        )
    return table


def _optional(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
