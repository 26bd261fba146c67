"""`specbranch plan` and `profile`: forecast the speed of a pair with drafts, and measure the cost of a draft step."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from specbranch.bench.forecast import Advice, Forecast, TypeForecast, advise, fastest, fastest_bare
from specbranch.bench.profile import PlotError, Profile, Timings, check_plot, measure, plot_profile, read_bandwidth
from specbranch.bench.scenario import read_prompts
from specbranch.bench.survey import MESSAGES, PairOptions, Survey, survey_types
from specbranch.cli.console import ProgressBar, console_for, friendly_errors, print_json, warn
from specbranch.cli.options import (
    AsJson,
    Cores,
    Device,
    Draft,
    DraftCores,
    DraftDevice,
    DraftDtype,
    DraftEngineName,
    Dtype,
    Engine,
    Model,
    ModelDtype,
    RecordFile,
    Target,
    TargetCores,
    Threads,
    VllmArg,
    check_directory,
    vllm_arguments,
)
from specbranch.cli.preflight import Preflight
from specbranch.core.planners import planner_names
from specbranch.engines.base import DraftEngine, EngineOptions
from specbranch.engines.registry import engine_for, open_engine
from specbranch.errors import EngineError, SpecBranchError, UsageError
from specbranch.launch.draft_process import DraftServiceOptions, place_pair
from specbranch.launch.placement import parse_ints, pin_process
from specbranch.launch.vllm_flags import flags_of
from specbranch.launch.vllm_install import slow_type_here, types_here
from specbranch.machine import provenance
from specbranch.plugins.vllm import installed
from specbranch.plugins.vllm.settings import ParallelLayout
from specbranch.trace import write_trace

MIN_GAIN = 0.1  # smaller gains are within the error of a forecast
_ERRORS = (
    "forecast error in our own runs: 3 to 20 % up to 4 concurrent requests; at 8 requests a third to a half too high. "
    "Prefill is not included."
)
_MIN_TOKENS = 16384  # of the KV cache


def plan(
    context: typer.Context,
    target: Target,
    draft: Draft,
    draft_device: DraftDevice = "auto",
    draft_engine: DraftEngineName = None,
    draft_dtype: DraftDtype = "auto",
    dtype: Dtype = "auto",
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSONL file with your own prompts. Default: 16 built-in prompts."),
    ] = None,
    field: Annotated[
        str, typer.Option(metavar="NAME", help="Field of each line of --prompts that holds the prompt.")
    ] = "prompt",
    num_prompts: Annotated[int, typer.Option(metavar="N", help="How many of --prompts to use.", min=1)] = 16,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Maximum tokens in one answer.", min=8)] = 64,
    concurrency: Annotated[
        str, typer.Option(metavar="LIST", help="Numbers of concurrent requests to forecast, separated by commas.")
    ] = "1,2,4,8,16",
    target_cores: TargetCores = None,
    draft_cores: DraftCores = None,
    vllm_arg: VllmArg = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write all measurements and forecasts, as JSON.")
    ] = None,
    record: RecordFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure a pair of models, and forecast how much faster drafting makes the target.

    This takes minutes: it times both models, replays real answers in the simulator with every planner,
    and ends with the command to run. On a CPU it times the target in every
    data type that fits, unless --dtype names one. All other flags go to vLLM.
    """
    with friendly_errors(SpecBranchError, OSError):
        for name, path in (("--out", out), ("--record", record)):
            check_directory(name, path)
        at_once = parse_ints("--concurrency", concurrency)
        if 0 in at_once:
            raise UsageError(f"--concurrency is {concurrency}; give numbers from 1 on")
        given = vllm_arguments(context, vllm_arg)
        how = DraftServiceOptions(draft, engine=draft_engine, device=draft_device, dtype=draft_dtype)
        place = place_pair(how, ParallelLayout.of_arguments(given), target_cores, draft_cores)
        assert place.draft is not None, "a draft was given"
        options = PairOptions(
            target=target,
            draft=place.draft,
            messages=MESSAGES if prompts is None else read_prompts("own", prompts, num_prompts, field),
            max_tokens=max_tokens,
            dtype=dtype,
            target_cores=place.target_cores,
            arguments={"enforce_eager": installed.runs_on_cpu(), **given},
        )
        arguments = options.target_options().arguments
        Preflight(target=target, draft=place.draft, arguments=arguments, target_cores=place.target_cores).run()
        warn(place.warning)
        warn(slow_type_here(target, arguments["dtype"]))
        with ProgressBar() as progress:
            surveys = survey_types(options, types_here(target, draft, dtype), progress.show)
            progress.show("simulating every planner")
            planners = list(planner_names())
            types = [TypeForecast(kind, survey, advise(survey, planners, at_once)) for kind, survey in surveys.items()]
        chosen = _chosen_flags(options, draft_device, target_cores, draft_cores, given)
        _print(console_for(as_json), types, [target, "--draft", draft], chosen)
        best = fastest(types)
        document = {
            "target": target,
            "draft": draft,
            "dtype": best.dtype,
            "survey": best.survey.as_json(),
            **best.advice.as_json(),
            "types": [one.as_json() for one in types],
            "provenance": provenance(),
        }
        if record is not None:
            write_trace(record, best.survey.trace)
        if out is not None:
            out.write_text(json.dumps(document, indent=1) + "\n")
        if as_json:
            print_json(document)


def _chosen_flags(
    options: PairOptions, device: str, target_cores: str | None, draft_cores: str | None, vllm: dict[str, Any]
) -> list[str]:
    """Return flags of `specbranch serve` for the options that differ from their defaults.

    `vllm` has the user's arguments of `vllm.LLM`; the others are options of `plan`.
    """
    values = {
        "--draft-device": None if device == "auto" else device,
        "--draft-engine": options.draft.engine,
        "--draft-dtype": None if options.draft.dtype == "auto" else options.draft.dtype,
        "--target-cores": target_cores,
        "--draft-cores": draft_cores,
        "--dtype": None if options.dtype == "auto" else options.dtype,
    }
    words = [word for flag, value in values.items() if value is not None for word in (flag, value)]
    return words + flags_of(vllm)


def _print(console: Console, types: Sequence[TypeForecast], pair: Sequence[str], chosen: Sequence[str]) -> None:
    advice, kind = fastest(types).advice, f" in {fastest(types).dtype}" if len(types) > 1 else ""
    shown = Table(
        title=f"forecast: decoding speed relative to vLLM without drafts{kind}", box=None, padding=(0, 2, 0, 0)
    )
    shown.add_column("planner")
    for concurrency in advice.concurrencies:
        shown.add_column("1 request" if concurrency == 1 else f"{concurrency} requests", justify="right")
    for planner in dict.fromkeys(forecast.method.planner for forecast in advice.forecasts):
        speeds = [one.speed for one in advice.forecasts if one.method.planner == planner]
        shown.add_row(planner, *(f"{speed:.2f}x" for speed in speeds))
    console.print(shown)
    for line in sentences(types, pair, chosen):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def sentences(types: Sequence[TypeForecast], pair: Sequence[str], chosen: Sequence[str]) -> list[str]:
    """Return sentences on what was measured and what to do; the last one is the command to run.

    `pair` has the command-line arguments for target and draft, and `chosen` further flags, without --dtype if there are
    several `types`.
    """
    with_drafts, without = fastest(types), fastest_bare(types)
    advice, best = with_drafts.advice, with_drafts.best
    gain = with_drafts.best_per_s / without.bare_per_s
    measured = [*_measured(with_drafts.survey, advice), *_type_lines(types)]
    if gain < 1 + MIN_GAIN:
        bare = ["specbranch", "serve", pair[0], "--bare", *_without_draft(chosen), *_type_flag(types, without)]
        return [
            *measured,
            f"drafts do not help: no planner is forecast to be {MIN_GAIN:.0%} faster than vLLM without drafts",
            "to serve without a draft:",
            f"  {shlex.join(bare)}",
        ]
    return [
        *measured,
        f"drafts help: {best.method.planner} is forecast to decode {gain:.2f} times as fast as vLLM without drafts"
        f"{' in its fastest type' if len(types) > 1 else ''}, at {_requests(best.concurrency)}{_rivals(advice, best)}",
        _limit(advice),
        "this makes each answer faster; for throughput alone, a second vLLM on a second device gives up to 2 times",
        _devices(advice, best),
        _ERRORS,
        "to serve with it:",
        f"  {serve_command(best, pair, [*chosen, *_type_flag(types, with_drafts)])}",
    ]


def serve_command(best: Forecast, pair: Sequence[str], chosen: Sequence[str]) -> str:
    """Return the command that serves the pair with the planner and draft length of the best forecast."""
    gamma = best.method.settings.get("gamma")
    longest = [] if gamma is None else ["--gamma", str(gamma)]
    return shlex.join(["specbranch", "serve", *pair, "--planner", best.method.planner, *longest, *chosen])


def _measured(survey: Survey, advice: Advice) -> list[str]:
    trace, many = survey.trace, max(survey.draft_s)
    overhead = (
        f"with the plugin but no drafts, a step takes {advice.terms.overhead(1):.2f} times as long as in vLLM "
        "without it: no asynchronous scheduling, other CUDA graphs; the forecast includes it"
    )
    return [
        f"measured: a target step takes {1e3 * survey.target_alone_s[1]:.0f} ms alone and "
        f"{1e3 * survey.target_beside_s:.0f} ms while the draft runs; a draft step takes "
        f"{1e3 * survey.draft_s[1]:.0f} ms for one row and {1e3 * survey.draft_s[many]:.0f} ms for {many}; "
        f"c (target step / draft step) is {advice.terms.c:.1f}",
        f"the target's token is the draft's most likely one at {trace.match_share():.0%} of {trace.num_tokens} "
        f"positions, and among its top 3 at {trace.match_share(3):.0%}",
        *([overhead] if survey.hooked_s else []),
    ]


def _type_lines(types: Sequence[TypeForecast]) -> list[str]:
    """Return lines on the speeds in every data type of the target, and the fastest; empty if there is only one type."""
    if len(types) == 1:
        return []
    speeds = "; ".join(f"{one.dtype} {one.bare_per_s:.1f} and {one.best_per_s:.1f}" for one in types)
    bare, best = fastest_bare(types), fastest(types)
    return [
        f"tokens/s of {_requests(best.best.concurrency)} by data type of the target, without drafts and with: {speeds}",
        f"fastest without drafts: {bare.dtype}, {bare.bare_per_s:.1f} tokens/s; fastest with drafts: {best.dtype}, "
        f"{best.best_per_s:.1f} tokens/s; what follows is about {best.dtype}",
    ]


def _type_flag(types: Sequence[TypeForecast], one: TypeForecast) -> list[str]:
    return ["--dtype", one.dtype] if len(types) > 1 else []


def _rivals(advice: Advice, best: Forecast) -> str:
    """Return a phrase that names the planners whose forecast is too close to the best one to tell them apart.

    The phrase is empty if there are no such planners.
    """
    near = [
        f"{one.method.planner} ({one.speed:.2f})"
        for one in advice.forecasts
        if one is not best and one.concurrency == best.concurrency and one.speed > (1 - MIN_GAIN) * best.speed
    ]
    return f"; {', '.join(near)}: not distinguishable from it" if near else ""


def _limit(advice: Advice) -> str:
    stop = advice.stops_at(MIN_GAIN)
    if stop is None:
        return f"drafts help at every number of requests that was forecast, up to {advice.concurrencies[-1]}"
    return f"drafts help below {stop} concurrent requests; from there on `specbranch serve` disables drafting by itself"


def _devices(advice: Advice, best: Forecast) -> str:
    more, shared = advice.with_two_drafts, advice.with_shared_draft
    second = (
        f"a second draft device would raise this to {more:.2f} times"
        if more > best.speed * 1.01
        else "a second draft device would not help"
    )
    return f"{second}; a draft shared by two such targets would give each {shared:.2f} times"


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} concurrent requests"


def _without_draft(chosen: Sequence[str]) -> list[str]:
    """Return the flags in `chosen` without those that only concern a draft, and without the values of those."""
    words = list(chosen)
    for flag in ("--draft-device", "--draft-engine", "--draft-dtype", "--draft-cores"):
        if flag in words:
            position = words.index(flag)
            del words[position : position + 2]
    return words


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
            pin_process(cores)
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
    counts = sorted(set(parse_ints("--rows", rows)))
    if len(counts) < 2 or counts[0] != 1:
        raise UsageError(f"--rows is {rows}; give 1 and at least one larger count")
    return counts


def _options(model: str, device: str, threads: int | None, dtype: str, context: int, max_rows: int) -> EngineOptions:
    """Return the engine's options, with its default limits raised where this measurement needs more."""
    usual = EngineOptions(model=model)
    return EngineOptions(
        model=model,
        device=device,
        threads=len(os.sched_getaffinity(0)) if threads is None else threads,
        dtype=dtype,
        max_tokens=max(_MIN_TOKENS, context + max_rows),
        max_handles=max(usual.max_handles, max_rows + 1),
        row_limit=max(usual.row_limit, max_rows),
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
    with ProgressBar() as progress:
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
    line = f"{1e3 * fit.cost.base_s:.4g} ms {1e3 * fit.cost.per_row_s:+.4g} ms for each further row"
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
        return f"{read}; the size of this engine's weights is unknown"
    size = f"{result.weight_bytes / 1e6:.0f} MB of weights"
    return f"{read}; {size} take {1e3 * result.bound_s:.3g} ms, {result.bound_share:.0%} of a step with one row"
