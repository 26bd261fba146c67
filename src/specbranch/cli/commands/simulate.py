"""`specbranch simulate`: compare planners on one pair of models, in virtual time, without hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from specbranch.cli.console import ProgressBar, console_for, friendly_errors, print_json
from specbranch.cli.options import GAMMA, GAMMA_HELP, AsJson, check_directory, parse_key_values
from specbranch.core.planners import PLANNERS, SettingError, setting_names
from specbranch.errors import UsageError
from specbranch.simulation.comparison import BOUNDS, PlannerComparison, Sweep
from specbranch.simulation.presets import PAIRS, ROW_COST, ModelPair, window_for
from specbranch.simulation.simulate import SimulationResult, simulated_predictors
from specbranch.trace import Trace, TraceError, read_trace

_MAX_POINTS = 100  # of a sweep
_DEFAULT_PRESET = "vicuna-68m-13b"
_PLOT_TYPES = (".png", ".svg", ".pdf")
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
    "speed: relative to decoding without drafts. hit rate: verification results with a prepared branch.",
    "rejected, unused, cut: discarded draft tokens per emitted token, by cause; losing: the part of them on",
    "branches that were not the draft's first choice. wait: share of the time that the target waits for drafts.",
    "agreement: how often the draft's most likely token is the target's, in this trace; a preset's value is its mean.",
)


def simulate(
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help=f"Pair of models from the paper; --list shows them. Default: {_DEFAULT_PRESET}."
        ),
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
        typer.Option("--c", metavar="RATIO", help=f"Target step time divided by draft step time, {BOUNDS['c']}."),
    ] = None,
    gamma: Annotated[
        int | None,
        typer.Option(*GAMMA, metavar="N", help=f"{GAMMA_HELP} Default: the preset's, else c."),
    ] = None,
    best: Annotated[bool, typer.Option("--best-gamma", help="Give every planner its own best gamma.")] = False,
    row_cost: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help=f"Cost of each additional draft row, as a share of a step with one row, {BOUNDS['row_cost']}.",
        ),
    ] = None,
    correlation: Annotated[
        float,
        typer.Option(
            metavar="R",
            help="How alike the draft's confidence is at neighbouring tokens, unless --trace is given, "
            f"{BOUNDS['correlation']}. Recorded traces have 0.18 to 0.48.",
        ),
    ] = 0.0,
    planners: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help=f"Planners, separated by commas. Default: all ({', '.join(PLANNERS)}).",
            show_default=False,
        ),
    ] = ",".join(PLANNERS),
    predictor: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What tells `specbranch` how much of the next window will be accepted: confidence (nothing does), "
            "none or all (always this), random, oracle (the truth), hrad (as recorded in the trace), or a predictor of "
            "another package.",
        ),
    ] = "confidence",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Setting of the planners that have it, such as gamma=4, or of one, such as specbranch.confidence=0.4; "
            "repeatable.",
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUES",
            help="Simulate once for each value of a setting, or of c, gamma, acceptance, correlation, row_cost or "
            "batch: c=2,4,8, or from:to:step as in specbranch.confidence=0.1:0.9:0.1. With c, gamma is c.",
        ),
    ] = None,
    form: Annotated[
        Literal["paper", "served"] | None,
        typer.Option(help="`specbranch` as in the paper or as served. Default: paper for presets, else served."),
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="N", help="Tokens to decode, unless --trace is given.", min=1)] = 5000,
    batch: Annotated[int, typer.Option(metavar="N", help="Requests that share a target step.", min=1)] = 1,
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed.")] = 0,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the first rounds and the speed against c; with --sweep, the sweep. A PNG, SVG or PDF file.",
        ),
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
        check_directory("--plot", plot)
        if plot is not None and plot.suffix not in _PLOT_TYPES:
            raise UsageError(f"--plot is {plot}; give a file that ends in {', '.join(_PLOT_TYPES)}")
        names = _planner_names(planners)
        if predictor not in simulated_predictors():
            choices = ", ".join(simulated_predictors())
            raise UsageError(f"no predictor is called {predictor!r}; choose from {choices}")
        pair, recorded = _pair(preset, trace, acceptance, c, gamma, row_cost, correlation)
        comparison = PlannerComparison(
            pair=pair,
            recorded=recorded,
            num_tokens=tokens,
            seed=seed,
            batch=batch,
            planners=names,
            settings=parse_key_values("--set", settings),
            predictor=predictor,
            as_in_paper=form == "paper" or (form is None and trace is None and acceptance is None),
            has_best_gamma=best,
        )
        if sweep is None:
            _compare(comparison, plot, as_json)
        else:
            _sweep(comparison, _parse_sweep(sweep), plot, as_json)


def _compare(comparison: PlannerComparison, plot: Path | None, as_json: bool) -> None:
    """Simulate the planners once, and print a table; draw the plot if a file is given for it."""
    console, names = console_for(as_json), list(comparison.planners)
    with ProgressBar() as progress:
        results = comparison.run(
            lambda planner: progress.show(f"simulating {planner}", names.index(planner), len(names))
        )
    trace = comparison.trace()
    _print_table(console, comparison, trace, results)
    if plot:
        from specbranch.simulation.plots import plot_comparison

        plot_comparison(plot, comparison, trace)
        console.print(f"drew {plot}", highlight=False)
    if as_json:
        print_json(_document(comparison, trace, results))


def _sweep(comparison: PlannerComparison, sweep: Sweep, plot: Path | None, as_json: bool) -> None:
    """Simulate the planners with each value of a parameter, and print their speeds; draw them if a file is given."""
    console, names, values = console_for(as_json), list(comparison.planners), list(sweep.values)
    with ProgressBar() as progress:
        points = sweep.run(
            comparison,
            lambda planner, value: progress.show(
                f"simulating {planner} with {sweep.name} {value}",
                values.index(value) * len(names) + names.index(planner),
                len(values) * len(names),
            ),
        )
    table = Table(title=f"{comparison.pair.name}: speed by {sweep.name}", box=None, padding=(0, 1, 0, 0))
    table.add_column(sweep.name, justify="right")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for value, results in zip(values, points, strict=True):
        table.add_row(f"{value}", *(f"{results[name].speedup:.2f}x" for name in names))
    console.print(table)
    if plot:
        from specbranch.simulation.plots import plot_sweep

        plot_sweep(plot, comparison, sweep, points)
        console.print(f"drew {plot}", highlight=False)
    if as_json:
        planners = {name: [results[name].as_json() for results in points] for name in names}
        print_json({**_inputs(comparison), "sweep": sweep.name, "values": values, "planners": planners})


def _parse_sweep(text: str) -> Sweep:
    """Return the sweep that `--sweep` describes: NAME=1,2,3 or NAME=LOW:HIGH:STEP. Raise `UsageError` for a mistake."""
    name, is_pair, given = text.partition("=")
    advice = f"--sweep is {text!r}; give KEY=VALUES, such as c=2,4,8 or specbranch.confidence=0.1:0.9:0.1"
    if not name or not is_pair or not given:
        raise UsageError(advice)
    name = name.replace("-", "_")
    if ":" not in given:
        return Sweep(name, [parse_key_values("--sweep", [f"{name}={value}"])[name] for value in given.split(",")])
    try:
        low, high, step = (float(part) for part in given.split(":"))
        count = int((high - low) / step + 1e-9) + 1
    except (ValueError, ZeroDivisionError, OverflowError):
        raise UsageError(advice) from None
    if not 1 <= count <= _MAX_POINTS:
        raise UsageError(f"--sweep {text} has {max(count, 0)} values; give 1 to {_MAX_POINTS}")
    values = [round(low + index * step, 9) for index in range(count)]
    return Sweep(name, [int(value) if value.is_integer() and step.is_integer() else value for value in values])


def _planner_names(planners: str) -> list[str]:
    names = [name.strip() for name in planners.split(",") if name.strip()]
    for name in names:
        setting_names(name)  # raises with the most similar known name
    if not names:
        raise UsageError(f"--planners is empty; choose from {', '.join(PLANNERS)}")
    return names


def _pair(
    preset: str | None,
    trace: Path | None,
    acceptance: float | None,
    c: float | None,
    gamma: int | None,
    row_cost: float | None,
    correlation: float,
) -> tuple[ModelPair, Trace | None]:
    """Return the pair that the options describe, and the trace to replay, if one is given."""
    if sum(choice is not None for choice in (preset, trace, acceptance)) > 1:
        raise UsageError("--preset, --trace and --acceptance exclude each other; give one of them")
    _refuse_outside("--c", c)
    _refuse_outside("--row-cost", row_cost)
    _refuse_outside("--correlation", correlation)
    recorded = None
    if trace is None and acceptance is None:
        pair = _preset_pair(preset or _DEFAULT_PRESET)
    elif c is None:
        raise UsageError("--trace and --acceptance need --c, the target's step time divided by the draft's")
    elif acceptance is not None:
        if not 0 < acceptance < 1:
            raise UsageError(f"--acceptance is {acceptance}; give a number between 0 and 1")
        pair = ModelPair("custom", c, window_for(c), acceptance, "given on the command line")
    else:
        assert trace is not None
        recorded = read_trace(trace)
        pair = ModelPair(trace.name, c, window_for(c), recorded.match_share(), f"recorded: {trace.name}")
    given: dict[str, Any] = {"c": c, "gamma": gamma, "row_cost": row_cost, "correlation": correlation}
    return replace(pair, **{name: value for name, value in given.items() if value is not None}), recorded


def _refuse_outside(option: str, value: float | None) -> None:
    bounds = BOUNDS[option.removeprefix("--").replace("-", "_")]
    if value is not None and not bounds.hold(value):
        raise UsageError(f"{option} is {value}; give a number {bounds}")


def _preset_pair(preset: str) -> ModelPair:
    if preset not in PAIRS:
        raise UsageError(f"no preset is called {preset!r}; choose from {', '.join(PAIRS)}")
    return PAIRS[preset]


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
    console: Console, comparison: PlannerComparison, trace: Trace, results: Mapping[str, SimulationResult]
) -> None:
    pair = comparison.pair
    title = f"{pair.name}: c {pair.c:g}, agreement {trace.match_share():.3f}, row cost {pair.row_cost:g}"
    caption = f"{trace.num_tokens} tokens, batch {comparison.batch}, predictor {comparison.predictor}"
    if "specbranch" in results:
        caption += f", specbranch {'in the paper' + chr(39) + 's form' if comparison.as_in_paper else 'as served'}"
    table = Table(title=title, caption=caption, box=None, padding=(0, 1, 0, 0))
    table.add_column("planner", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for name, result in results.items():
        table.add_row(name, *_cells(result))
    console.print(table)
    for line in _LEGEND:
        console.print(line, highlight=False, soft_wrap=True)
    fastest, result = max(results.items(), key=lambda one: one[1].speedup)
    console.print(f"fastest: {fastest}, {result.speedup:.2f}x", style="bold", highlight=False)
    console.print(f"source: {pair.source}", highlight=False)


def _cells(result: SimulationResult) -> Sequence[str]:
    figures = result.as_json()
    lost = figures["rolled_back"]
    return (
        str(result.method.settings.get("gamma", "-")),
        f"{result.speedup:.2f}x",
        f"{figures['emitted_per_round']:.2f}",
        f"{figures['hit_rate']:.2f}",
        f"{lost['rejected']:.2f}",
        f"{lost['unused']:.2f}",
        f"{figures['losing']:.2f}",
        f"{lost['cut']:.2f}",
        f"{figures['wait_share']:.0%}",
        f"{figures['rows_per_round']:.1f}",
    )


def _inputs(comparison: PlannerComparison) -> dict[str, Any]:
    pair = comparison.pair
    return {
        "preset": pair.name,
        "source": pair.source,
        "c": pair.c,
        "acceptance": pair.acceptance,
        "row_cost": pair.row_cost,
        "correlation": pair.correlation,
        "batch": comparison.batch,
        "predictor": comparison.predictor,
        "seed": comparison.seed,
    }


def _document(comparison: PlannerComparison, trace: Trace, results: Mapping[str, SimulationResult]) -> dict[str, Any]:
    return {
        **_inputs(comparison),
        "num_tokens": trace.num_tokens,
        "planners": {
            name: {**result.as_json(), "settings": dict(result.method.settings)} for name, result in results.items()
        },
    }
