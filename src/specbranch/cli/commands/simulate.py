"""`specbranch simulate`: compare planners on one pair of models, in virtual time, without hardware."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from specbranch.cli.console import ProgressBar, console_for, friendly_errors, print_json
from specbranch.cli.options import AsJson
from specbranch.core.planner import Bounds
from specbranch.core.planners import PLANNERS, SettingError, setting_names
from specbranch.core.round import MAX_WINDOW
from specbranch.errors import UsageError
from specbranch.simulation.presets import PAIRS, ROW_COST, ModelPair, make_trace
from specbranch.simulation.simulate import PREDICTORS, Layout, Method, SimulationResult, best_gamma, method_for
from specbranch.simulation.simulate import simulate as run_simulation
from specbranch.trace import Trace, TraceError, read_trace

ANSWER_LEN = 250
_C_BOUNDS = Bounds(0.01, 1000)
_ROW_COST_BOUNDS = Bounds(0, 100)
_COLUMNS = (
    "gamma",
    "speed",
    "tokens\n/round",
    "hit\nrate",
    "rejected",
    "unused",
    "(losing)",
    "cut",
    "wait",
    "rows\n/round",
)
_LEGEND = (
    "speed: relative to decoding without drafts. hit rate: verdicts for which a branch was ready.",
    "rejected, unused, cut: draft tokens rolled back per emitted token, by cause; losing: the part of them on",
    "branches that were not the draft's first choice. wait: share of the time that the target waits for drafts.",
    "agreement: how often the draft's most likely token is the target's, in this trace; a preset's value is its mean.",
)


@dataclass(frozen=True, slots=True)
class _Case:
    """The input of a simulation: a pair of models and a trace of its answers."""

    name: str
    pair: ModelPair
    trace: Trace


def simulate(
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", help="Pair of models from the paper; --list shows them.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Replay a trace written by `draft`, `serve` or `plan` with --record. Needs --c."
        ),
    ] = None,
    acceptance: Annotated[
        float | None,
        typer.Option(metavar="P", help="Your own pair: how often the draft's token is the target's. Needs --c."),
    ] = None,
    c: Annotated[
        float | None,
        typer.Option("--c", metavar="RATIO", help=f"Target step time divided by draft step time, {_C_BOUNDS}."),
    ] = None,
    gamma: Annotated[
        int | None,
        typer.Option(metavar="N", help="Most draft tokens verified at once. Default: the preset's, else c."),
    ] = None,
    best: Annotated[bool, typer.Option("--best-gamma", help="Give every planner its own best gamma.")] = False,
    row_cost: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help=f"Cost of each additional draft row, as a share of a step with one row, {_ROW_COST_BOUNDS}.",
        ),
    ] = None,
    planners: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help=f"Planners, separated by commas. Default: all ({', '.join(PLANNERS)}).",
            show_default=False,
        ),
    ] = ",".join(PLANNERS),
    predictor: Annotated[
        str, typer.Option(metavar="NAME", help=f"What predicts acceptance: {', '.join(PREDICTORS)}.")
    ] = "confidence",
    form: Annotated[
        Literal["paper", "served"] | None,
        typer.Option(help="`specbranch` as in the paper or as served. Default: paper for presets, else served."),
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="N", help="Tokens to decode, unless --trace is given.", min=1)] = 5000,
    batch: Annotated[int, typer.Option(metavar="N", help="Requests that share a target step.", min=1)] = 1,
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the first rounds and the speed against c.")
    ] = None,
    as_json: AsJson = False,
    list_presets: Annotated[bool, typer.Option("--list", help="List the presets with their sources.")] = False,
) -> None:
    """Compare planners in a simulation, without models or devices.

    Target and draft run on two devices at the same time.
    Step times and the draft's accuracy come from a preset, a trace or options.
    """
    if list_presets:
        _print_presets(console_for(False))
        return
    with friendly_errors(UsageError, SettingError, TraceError, ImportError):
        names = _planner_names(planners)
        if predictor not in PREDICTORS:
            raise UsageError(f"no predictor is called {predictor!r}; choose from {', '.join(PREDICTORS)}")
        as_in_paper = form == "paper" or (form is None and trace is None and acceptance is None)
        case = _case(preset, trace, acceptance, c, gamma, row_cost, tokens, seed)
        layout = Layout(case.pair.c, case.pair.row_cost, batch)
        method_of = partial(method_for, predictor=predictor, as_in_paper=as_in_paper, has_text=case.trace.has_prompts)
        outcomes = _run(case, [method_of(name, case.pair) for name in names], layout, seed, best)
        _print_table(console_for(as_json), case, layout, predictor, outcomes)
        if plot:
            from specbranch.simulation.plots import plot_simulation

            plot_simulation(plot, case.name, case.pair, case.trace, names, method_of, seed)
            console_for(as_json).print(f"drew {plot}", highlight=False)
        if as_json:
            print_json(_document(case, layout, predictor, seed, outcomes))


def _planner_names(planners: str) -> list[str]:
    names = [name.strip() for name in planners.split(",") if name.strip()]
    for name in names:
        setting_names(name)  # raises with the most similar known name
    if not names:
        raise UsageError(f"--planners is empty; choose from {', '.join(PLANNERS)}")
    return names


def _window(c: float) -> int:
    """Return gamma as the papers on PEARL and SpecBranch choose it: `c`, rounded and clamped to the valid range.

    `c` is the target's step time divided by the draft's. The range is from 1 to `MAX_WINDOW`.
    """
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
        raise UsageError("--preset, --trace and --acceptance exclude each other; give one of them")
    _refuse_outside("--c", c, _C_BOUNDS)
    _refuse_outside("--row-cost", row_cost, _ROW_COST_BOUNDS)
    if trace is None and acceptance is None:
        base = _preset_pair(preset or "vicuna-68m-13b")
    elif c is None:
        raise UsageError("--trace and --acceptance need --c, the target's step time divided by the draft's")
    elif acceptance is not None:
        if not 0 < acceptance < 1:
            raise UsageError(f"--acceptance is {acceptance}; give a number between 0 and 1")
        base = ModelPair("custom", c, _window(c), acceptance, "given on the command line")
    else:
        assert trace is not None
        recorded = read_trace(trace)
        base = ModelPair(trace.name, c, _window(c), recorded.match_share(), f"recorded: {trace.name}")
    pair = ModelPair(
        base.name,
        base.c if c is None else c,
        base.gamma if gamma is None else gamma,
        base.acceptance,
        base.source,
        row_cost=base.row_cost if row_cost is None else row_cost,
    )
    if trace is not None:
        return _Case(pair.name, pair, recorded)
    answers = max(1, tokens // ANSWER_LEN)
    return _Case(pair.name, pair, make_trace(pair, answers, min(tokens, ANSWER_LEN), random.Random(seed)))


def _refuse_outside(option: str, value: float | None, bounds: Bounds) -> None:
    if value is not None and not bounds.hold(value):
        raise UsageError(f"{option} is {value}; give a number {bounds}")


def _preset_pair(preset: str) -> ModelPair:
    if preset not in PAIRS:
        raise UsageError(f"no preset is called {preset!r}; choose from {', '.join(PAIRS)}")
    return PAIRS[preset]


def _run(case: _Case, methods: list[Method], layout: Layout, seed: int, best: bool) -> dict[str, SimulationResult]:
    outcomes = {}
    with ProgressBar() as progress:
        for done, method in enumerate(methods):
            progress.show(f"simulating {method.planner}", done, len(methods))
            outcomes[method.planner] = (best_gamma if best else run_simulation)(case.trace, method, layout, seed)
    return outcomes


def _print_presets(console: Console) -> None:
    table = Table(title="Presets: the paper's four pairs")
    for column in ("preset", "c", "gamma", "acceptance", "source"):
        table.add_column(column, justify="left" if column in ("preset", "source") else "right")
    for pair in PAIRS.values():
        table.add_row(pair.name, f"{pair.c:g}", str(pair.gamma), f"{pair.acceptance:.3f}", pair.source)
    console.print(table)
    console.print(
        f"Each additional draft row costs {ROW_COST:g} of a step with one row: an assumption, see --row-cost."
    )


def _print_table(
    console: Console, case: _Case, layout: Layout, predictor: str, outcomes: dict[str, SimulationResult]
) -> None:
    pair = case.pair
    title = f"{case.name}: c {pair.c:g}, agreement {case.trace.match_share():.3f}, row cost {pair.row_cost:g}"
    caption = f"{case.trace.num_tokens} tokens, batch {layout.batch}, predictor {predictor}"
    table = Table(title=title, caption=caption, box=None, padding=(0, 1, 0, 0))
    table.add_column("planner", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for name, outcome in outcomes.items():
        stats = outcome.as_json()
        lost = stats["rolled_back"]
        table.add_row(
            name,
            str(outcome.method.settings.get("gamma", "-")),
            f"{outcome.speedup:.2f}x",
            f"{stats['emitted_per_round']:.2f}",
            f"{stats['hit_rate']:.2f}",
            f"{lost['rejected']:.2f}",
            f"{lost['unused']:.2f}",
            f"{stats['losing']:.2f}",
            f"{lost['cut']:.2f}",
            f"{stats['wait_share']:.0%}",
            f"{stats['rows_per_round']:.1f}",
        )
    console.print(table)
    for line in _LEGEND:
        console.print(line, highlight=False, soft_wrap=True)
    fastest, outcome = max(outcomes.items(), key=lambda one: one[1].speedup)
    console.print(f"fastest: {fastest}, {outcome.speedup:.2f}x", style="bold", highlight=False)
    console.print(f"source: {pair.source}", highlight=False)


def _document(
    case: _Case, layout: Layout, predictor: str, seed: int, outcomes: dict[str, SimulationResult]
) -> dict[str, Any]:
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
