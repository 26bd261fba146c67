"""`specbranch profile`: the step time of a draft engine against rows, and whether memory bandwidth limits it."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from specbranch.bench.profile import Profile, Timings, measure, read_bandwidth
from specbranch.bench.profile_plot import PlotError, check_plot, plot_profile
from specbranch.cli.console import console_for, friendly_errors, print_json
from specbranch.cli.options import AsJson, Cores, Device, Engine, Model, ModelDtype, Threads
from specbranch.cli.progress import Progress
from specbranch.engines.base import DraftEngine, EngineOptions
from specbranch.engines.registry import engine_for, open_engine
from specbranch.errors import EngineError, UsageError
from specbranch.launch.placement import numbers, stay_on
from specbranch.machine import provenance

_LEAST_TOKENS = 16384  # of the KV cache


def profile(
    model: Model,
    engine: Engine = None,
    device: Device = "cpu",
    dtype: ModelDtype = "auto",
    threads: Threads = None,
    cores: Cores = None,
    rows: Annotated[
        str, typer.Option(metavar="LIST", help="Batch sizes to measure, separated by commas; must contain 1.")
    ] = "1,2,4,8,16",
    context: Annotated[int, typer.Option(metavar="N", help="Tokens in the KV cache before each step.", min=1)] = 256,
    steps: Annotated[int, typer.Option(metavar="N", help="Steps to measure at each batch size.", min=1)] = 12,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw step time against batch size: .png, .svg or .pdf.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how long a step of a draft model takes at each batch size.

    It fits a line to the times and says whether memory bandwidth limits them.
    A row is one sequence in a batch.
    """
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
            console.print(f"drew {plot}", highlight=False)
        if as_json:
            print_json({**result.as_json(), "provenance": provenance()})


def _row_counts(rows: str) -> list[int]:
    counts = sorted(set(numbers("--rows", rows)))
    if len(counts) < 2 or counts[0] != 1:
        raise UsageError(f"--rows is {rows}; give 1 and at least one larger count")
    return counts


def _options(model: str, device: str, threads: int | None, dtype: str, context: int, most_rows: int) -> EngineOptions:
    """An engine's default limits, raised where this measurement needs more."""
    usual = EngineOptions(model=model)
    return EngineOptions(
        model=model,
        device=device,
        threads=len(os.sched_getaffinity(0)) if threads is None else threads,
        dtype=dtype,
        max_tokens=max(_LEAST_TOKENS, context + most_rows),
        max_handles=max(usual.max_handles, most_rows + 1),
        row_limit=max(usual.row_limit, most_rows),
    )


def _profile(name: str, options: EngineOptions, rows: list[int], context: int, steps: int) -> Profile:
    assert options.threads is not None
    engine = open_engine(name, options)
    try:
        timings = _measure(engine, rows, context, steps)
        bandwidth = read_bandwidth(name, options.device, options.threads)
        return Profile(
            engine=name,
            info=engine.info,
            threads=options.threads,
            timings=timings,
            bandwidth=bandwidth,
        )
    finally:
        engine.shutdown()


def _measure(engine: DraftEngine, rows: list[int], context: int, steps: int) -> Timings:
    done = count(1)
    with Progress() as progress:
        progress.show("measuring", 0, steps + 1)
        return measure(engine, rows, context, steps, on_round=lambda: progress.show("measuring", next(done), steps + 1))


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
    return f"fit: {line}; the largest error of the fit is {fit.worst_deviation:.0%}"


def _cache_line(result: Profile) -> str:
    timings = result.timings
    copies = "copies the KV cache" if timings.fork_copies_tokens else "copies nothing"
    forks = f"a new branch takes {1e6 * timings.fork_s:.1f} µs and {copies}"
    return f"prefill: {timings.prefill_tokens_per_s:.0f} tokens/s; {forks}"


def _bound_line(result: Profile) -> str:
    if result.bandwidth is None:
        return f"memory: the bandwidth of {result.info.device} is unknown"
    read = f"memory: reads {result.bandwidth / 1e9:.1f} GB/s"
    if result.weight_bytes is None or result.bound_s is None:
        return f"{read}; this engine does not tell the size of its weights"
    size = f"{result.weight_bytes / 1e6:.0f} MB of weights"
    return f"{read}; {size} take {1e3 * result.bound_s:.3g} ms, {result.bound_share:.0%} of a step with one row"
