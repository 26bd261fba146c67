"""`specbranch profile`: what a step of a draft engine costs, row by row, and whether memory is what limits it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from specbranch.bench.profile import Profile, Timings, measure, provenance, read_bandwidth, weight_bytes
from specbranch.bench.profile_plot import PlotError, check_plot, plot_profile
from specbranch.cli.console import UsageError, console_for, friendly_errors, print_json, progress_bar
from specbranch.cli.cores import stay_on
from specbranch.cli.values import numbers
from specbranch.engines.options import EngineOptions
from specbranch.engines.protocol import DraftEngine, EngineError
from specbranch.engines.registry import ENGINES, engine_for, open_engine


def profile(
    model: Annotated[str, typer.Option(help="A path, a name below $SPECBRANCH_MODELS, or a name on the hub.")],
    engine: Annotated[str | None, typer.Option(help=f"One of {', '.join(ENGINES)}. Default: what suits it.")] = None,
    device: Annotated[str, typer.Option(help="Where the model runs.")] = "cpu",
    threads: Annotated[int | None, typer.Option(help="Threads. Default: one per core of this process.")] = None,
    cores: Annotated[str | None, typer.Option(help="Keep this process on these cores, separated by commas.")] = None,
    rows: Annotated[str, typer.Option(help="Row counts to measure, separated by commas; 1 among them.")] = "1,2,4,8,16",
    context: Annotated[int, typer.Option(help="Tokens in the cache before each step.", min=1)] = 256,
    steps: Annotated[int, typer.Option(help="Measured steps of each row count.", min=1)] = 12,
    dtype: Annotated[str, typer.Option(help="Number format of the weights, for engines that choose.")] = "auto",
    plot: Annotated[Path | None, typer.Option(help="Draw step time against rows to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document as the last line of stdout.")] = False,
) -> None:
    """Measure the step time of a draft engine against rows, fit a line, and compare with the memory's bandwidth."""
    with friendly_errors(UsageError, EngineError, PlotError, ImportError):
        row_counts = _row_counts(rows)
        if plot:
            check_plot(plot)
        if cores is not None:
            stay_on(cores)
        name = engine or engine_for(model)
        options = _options(model, device, threads, dtype, context, max(row_counts))
        result = _profile(name, options, row_counts, context, steps)
        console = console_for(as_json)
        _print_table(console, result)
        _print_findings(console, result)
        if plot:
            plot_profile(plot, result)
            console.print(f"drawn to {plot}", highlight=False)
        if as_json:
            print_json({**result.as_json(), "provenance": provenance()})


def _row_counts(rows: str) -> list[int]:
    counts = sorted(set(numbers("--rows", rows)))
    if len(counts) < 2 or counts[0] != 1:
        raise UsageError(f"--rows is {rows}; give 1 and at least one larger count")
    return counts


def _options(model: str, device: str, threads: int | None, dtype: str, context: int, most_rows: int) -> EngineOptions:
    """An engine's usual limits, wider only where this measurement needs it."""
    usual = EngineOptions(model)
    return EngineOptions(
        model,
        device,
        len(os.sched_getaffinity(0)) if threads is None else threads,
        dtype,
        max_tokens=max(usual.max_tokens, context + most_rows),
        max_handles=max(usual.max_handles, most_rows + 1),
        row_limit=max(usual.row_limit, most_rows),
    )


def _profile(name: str, options: EngineOptions, rows: list[int], context: int, steps: int) -> Profile:
    assert options.threads is not None
    engine = open_engine(name, options)
    try:
        timings = _measure(engine, rows, context, steps)
        bandwidth = read_bandwidth(name, options.device, options.threads)
        return Profile(name, engine.info, options.threads, timings, weight_bytes(engine), bandwidth)
    finally:
        engine.shutdown()


def _measure(engine: DraftEngine, rows: list[int], context: int, steps: int) -> Timings:
    with progress_bar() as bar:
        task = bar.add_task("measuring", total=steps + 1)
        return measure(engine, rows, context, steps, on_round=lambda: bar.advance(task))


def _print_table(console: Console, result: Profile) -> None:
    info, timings, cost = result.info, result.timings, result.fit.cost
    title = f"{info.model}: {result.engine} on {info.device}, threads {result.threads}, context {timings.context_len}"
    table = Table(title=title, box=None, padding=(0, 2, 0, 0))
    for column in ("rows", "median ms", "p10", "p90", "fitted", "over one row", "rows/s"):
        table.add_column(column, justify="right", no_wrap=True)
    one_row_s = timings.by_rows[1].median_s
    for rows, spread in timings.by_rows.items():
        times_s = (spread.median_s, spread.p10_s, spread.p90_s, cost.at(rows))
        table.add_row(
            str(rows),
            *(f"{1e3 * time_s:.2f}" for time_s in times_s),
            f"{spread.median_s / one_row_s:.2f}x",
            f"{rows / spread.median_s:.0f}",
        )
    console.print(table)


def _print_findings(console: Console, result: Profile) -> None:
    for line in (_fit_line(result), _cache_line(result), _bound_line(result), f"limit: {result.limit}"):
        console.print(line, highlight=False, soft_wrap=True)


def _fit_line(result: Profile) -> str:
    fit = result.fit
    line = f"{1e3 * fit.cost.first_s:.4g} ms {1e3 * fit.cost.more_s:+.4g} ms for each further row"
    return f"fit: {line}; the worst median lies {fit.worst_deviation:.0%} off"


def _cache_line(result: Profile) -> str:
    timings = result.timings
    copies = "copies tokens" if timings.fork_copies_tokens else "copies nothing"
    return f"prefill: {timings.prefill_tokens_per_s:.0f} tokens/s; a fork takes {1e6 * timings.fork_s:.1f} µs, {copies}"


def _bound_line(result: Profile) -> str:
    if result.bandwidth is None:
        return f"memory: the bandwidth of {result.info.device} cannot be measured from here"
    read = f"memory: {result.bandwidth / 1e9:.1f} GB/s read"
    if result.weight_bytes is None or result.bound_s is None:
        return f"{read}; this engine does not tell the size of its weights"
    size = f"{result.weight_bytes / 1e6:.0f} MB of weights"
    return f"{read}; {size} in {1e3 * result.bound_s:.3g} ms, {result.bound_share:.0%} of the one-row step"
