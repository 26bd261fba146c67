"""`specbranch bench`: run a scenario on real engines, and show what its results say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from specbranch.bench.prompts import PromptError
from specbranch.bench.runner import run_scenario
from specbranch.bench.scenario import Scenario, ScenarioError, read_scenario, scenario_of
from specbranch.bench.summary import Line, ResultError, read_results, summarize
from specbranch.bench.worker import WorkerError
from specbranch.cli.console import console_for, friendly_errors, print_json, progress_bar
from specbranch.core.planners import SettingError
from specbranch.service.process import StartError

_COLUMNS = (
    "task", "at", "method", "n", "tok/s", "speed", "range", "/round", "hits", "lost", "ms", "hook", "same"
)  # fmt: skip
_CAPTION = (
    "at: requests at once; n: trials; speed: tokens per second over bare vLLM, range: 95 % of resamples; /round: "
    "emitted tokens; lost: rolled back per emitted token; ms: of a round; hook: ms of the proposer's call; same: "
    "answers equal to bare vLLM's"
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
    with friendly_errors(ScenarioError, SettingError, PromptError, ResultError, WorkerError, StartError, OSError):
        chosen = read_scenario(scenario)
        num_done = _num_done(chosen, out) if resume else 0
        with out.open("a" if resume else "x") as sink, progress_bar() as bar:
            task = bar.add_task("starting engines", total=None)
            run_scenario(
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


def _num_done(scenario: Scenario, path: Path) -> int:
    """Trials that a result file already holds; it must be of the same scenario."""
    header, records = read_results(path)
    if scenario_of(header["scenario"]) != scenario:
        raise ResultError(f"{path} holds results of another scenario, or of another state of it; begin a new file")
    return len(records)


def _print(path: Path, as_json: bool) -> None:
    header, records = read_results(path)
    lines = summarize(records)
    if as_json:
        print_json({"scenario": header["scenario"], "lines": [line.as_json() for line in lines]})
    else:
        console_for(as_json).print(_table(header["scenario"]["name"], lines))


def _table(name: str, lines: list[Line]) -> Table:
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
            f"{line.speedup:.2f}",
            f"{line.low:.2f}-{line.high:.2f}",
            f"{line.emitted_per_round:.2f}",
            _optional(line.hit_rate, ".0%"),
            _optional(line.rolled_back, ".2f"),
            f"{line.round_ms:.0f}",
            _optional(line.hook_ms, ".1f"),
            f"{line.same_as_bare:.0%}",
        )
    return table


def _optional(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
