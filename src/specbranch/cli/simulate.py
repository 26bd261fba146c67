"""`specbranch simulate`: every planner on one pair of models, in virtual time, before anyone buys hardware."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from specbranch.cli.console import UsageError, console_for, friendly_errors, print_json, progress_bar
from specbranch.core.planners import PLANNERS, SettingError, setting_names
from specbranch.core.round import MAX_WINDOW
from specbranch.simulation.presets import PAIRS, ROW_COST, Pair, make_trace
from specbranch.simulation.simulate import PREDICTORS, Layout, Method, Outcome, best_gamma, method_for
from specbranch.simulation.simulate import simulate as run_simulation
from specbranch.trace import Trace, TraceError, read_trace

ANSWER_LEN = 250
_COLUMNS = (
    "gamma",
    "speed",
    "emitted\n/round",
    "hit\nrate",
    "rejected",
    "unused",
    "(losing)",
    "cut",
    "wait",
    "rows\n/round",
)


@dataclass(frozen=True, slots=True)
class _Case:
    """What is simulated: a pair of models and a trace of it."""

    name: str
    pair: Pair
    trace: Trace


def simulate(
    preset: Annotated[str | None, typer.Option(help="A pair of the paper; --list shows them.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Replay a recorded trace file instead. Needs --c.")] = None,
    acceptance: Annotated[float | None, typer.Option(help="A pair of your own: greedy agreement. Needs --c.")] = None,
    c: Annotated[float | None, typer.Option("--c", help="Target step time over draft step time.")] = None,
    gamma: Annotated[int | None, typer.Option(help="Window of every planner. Default: the preset's, else c.")] = None,
    best: Annotated[bool, typer.Option("--best-gamma", help="Let every planner use the gamma that suits it.")] = False,
    row_cost: Annotated[float | None, typer.Option(help="Cost of one more draft row, in one-row steps.")] = None,
    planners: Annotated[str, typer.Option(help="Planners, separated by commas.")] = ",".join(PLANNERS),
    predictor: Annotated[str, typer.Option(help=f"One of {', '.join(PREDICTORS)}.")] = "confidence",
    form: Annotated[
        str | None,
        typer.Option(help="specbranch as in the `paper` or as `served`. Default: paper for presets, else served."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to decode, where no trace is given.", min=1)] = 5000,
    batch: Annotated[int, typer.Option(help="Sequences that share the target's step.", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw the first rounds and speed against c to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document as the last line of stdout.")] = False,
    list_presets: Annotated[bool, typer.Option("--list", help="List the presets with their sources.")] = False,
) -> None:
    """Simulate planners on two devices that overlap, with given step times and a given alignment of the models."""
    if list_presets:
        _print_presets(console_for(False))
        return
    with friendly_errors(UsageError, SettingError, TraceError, ImportError):
        names = _planner_names(planners)
        if predictor not in PREDICTORS:
            raise UsageError(f"no predictor is called {predictor!r}; choose from {', '.join(PREDICTORS)}")
        if form not in (None, "paper", "served"):
            raise UsageError(f"--form is {form!r}; choose paper or served")
        as_in_paper = form == "paper" or (form is None and trace is None and acceptance is None)
        case = _case(preset, trace, acceptance, c, gamma, row_cost, tokens, seed)
        layout = Layout(case.pair.c, case.pair.row_cost, batch)
        method_of = partial(method_for, predictor=predictor, as_in_paper=as_in_paper)
        outcomes = _run(case, [method_of(name, case.pair) for name in names], layout, seed, best)
        _print_table(console_for(as_json), case, layout, predictor, outcomes)
        if plot:
            from specbranch.simulation.plots import plot_simulation

            plot_simulation(plot, case.name, case.pair, case.trace, names, method_of, seed)
            console_for(as_json).print(f"drawn to {plot}")
        if as_json:
            print_json(_document(case, layout, predictor, seed, outcomes))


def _planner_names(planners: str) -> list[str]:
    names = [name.strip() for name in planners.split(",") if name.strip()]
    for name in names:
        setting_names(name)  # raises with the nearest known name
    if not names:
        raise UsageError(f"--planners is empty; choose from {', '.join(PLANNERS)}")
    return names


def _window(c: float) -> int:
    """As many tokens as the draft makes in a step of the target, which is what the papers choose."""
    return min(max(1, round(c)), MAX_WINDOW)


def _case(
    preset: str | None,
    trace: Path | None,
    acceptance: float | None,
    c: float | None,
    gamma: int | None,
    row_cost: float | None,
    tokens: int,
    seed: int,
) -> _Case:
    if sum(choice is not None for choice in (preset, trace, acceptance)) > 1:
        raise UsageError("--preset, --trace and --acceptance exclude each other")
    if c is not None and not c > 0:
        raise UsageError(f"--c is {c}; give a positive number")
    if row_cost is not None and not row_cost >= 0:
        raise UsageError(f"--row-cost is {row_cost}; give a number of at least 0")
    if trace is None and acceptance is None:
        base = _preset_pair(preset or "vicuna-68m-13b")
    elif c is None:
        raise UsageError("--trace and --acceptance need --c: measure both models' step times and divide")
    elif acceptance is not None:
        if not 0 < acceptance < 1:
            raise UsageError(f"--acceptance is {acceptance}; give a number between 0 and 1")
        base = Pair("custom", c, _window(c), acceptance, "given on the command line")
    else:
        assert trace is not None
        recorded = read_trace(trace)
        base = Pair(trace.name, c, _window(c), recorded.match_share(), f"recorded: {trace.name}")
    pair = Pair(
        base.name,
        base.c if c is None else c,
        base.gamma if gamma is None else gamma,
        base.acceptance,
        base.source,
        base.row_cost if row_cost is None else row_cost,
    )
    if trace is not None:
        return _Case(pair.name, pair, recorded)
    answers = max(1, tokens // ANSWER_LEN)
    return _Case(pair.name, pair, make_trace(pair, answers, min(tokens, ANSWER_LEN), random.Random(seed)))


def _preset_pair(preset: str) -> Pair:
    if preset not in PAIRS:
        raise UsageError(f"no preset is called {preset!r}; choose from {', '.join(PAIRS)}")
    return PAIRS[preset]


def _run(case: _Case, methods: list[Method], layout: Layout, seed: int, best: bool) -> dict[str, Outcome]:
    outcomes = {}
    with progress_bar() as bar:
        task = bar.add_task("simulating", total=len(methods))
        for method in methods:
            bar.update(task, description=method.planner)
            outcomes[method.planner] = (best_gamma if best else run_simulation)(case.trace, method, layout, seed)
            bar.advance(task)
    return outcomes


def _print_presets(console: Console) -> None:
    table = Table(title="Presets: the paper's four pairs")
    for column in ("preset", "c", "gamma", "acceptance", "source"):
        table.add_column(column, justify="left" if column in ("preset", "source") else "right")
    for pair in PAIRS.values():
        table.add_row(pair.name, f"{pair.c:g}", str(pair.gamma), f"{pair.acceptance:.3f}", pair.source)
    console.print(table)
    console.print(
        f"One more draft row costs {ROW_COST:g} of a one-row step (an assumption; change it with --row-cost)."
    )


def _print_table(console: Console, case: _Case, layout: Layout, predictor: str, outcomes: dict[str, Outcome]) -> None:
    pair = case.pair
    title = f"{case.name}: c {pair.c:g}, greedy agreement {case.trace.match_share():.3f}, row cost {pair.row_cost:g}"
    caption = f"{case.trace.num_tokens} tokens, batch {layout.batch}, predictor {predictor}"
    table = Table(title=title, caption=caption, box=None, padding=(0, 1, 0, 0))
    table.add_column("planner", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for name, outcome in outcomes.items():
        figures = outcome.as_json()
        lost = figures["rolled_back"]
        table.add_row(
            name,
            str(outcome.method.settings.get("gamma", "-")),
            f"{outcome.speedup:.2f}x",
            f"{figures['emitted_per_round']:.2f}",
            f"{figures['hit_rate']:.2f}",
            f"{lost['rejected']:.2f}",
            f"{lost['unused']:.2f}",
            f"{figures['losing']:.2f}",
            f"{lost['cut']:.2f}",
            f"{figures['wait_share']:.0%}",
            f"{figures['rows_per_round']:.1f}",
        )
    console.print(table)
    console.print("speed: over plain decoding. rejected, unused, cut: rolled-back draft tokens per emitted token;")
    console.print("losing: the part of them on branches that were not the draft's first choice.")
    console.print(f"source: {pair.source}", highlight=False)


def _document(case: _Case, layout: Layout, predictor: str, seed: int, outcomes: dict[str, Outcome]) -> dict[str, Any]:
    pair = case.pair
    return {
        "preset": case.name,
        "source": pair.source,
        "c": pair.c,
        "acceptance": pair.acceptance,
        "row_cost": pair.row_cost,
        "batch": layout.batch,
        "predictor": predictor,
        "num_tokens": case.trace.num_tokens,
        "seed": seed,
        "planners": {
            name: {**outcome.as_json(), "settings": dict(outcome.method.settings)} for name, outcome in outcomes.items()
        },
    }
