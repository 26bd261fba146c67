"""`specbranch plan`: does it pay for this pair on this machine, with which planner, and up to how many requests."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from specbranch.bench.forecast import Advice, Forecast, advise
from specbranch.bench.profile import provenance
from specbranch.bench.prompts import PromptError, read_prompts
from specbranch.bench.survey import MESSAGES, Survey, take_survey
from specbranch.bench.worker import VLLM, Worker, WorkerError
from specbranch.cli.console import UsageError, console_for, friendly_errors, print_json, progress_bar
from specbranch.cli.cores import divide_cores
from specbranch.cli.values import numbers
from specbranch.core.planners import PLANNERS
from specbranch.engines.options import EngineOptions
from specbranch.engines.protocol import EngineError
from specbranch.engines.registry import ENGINES, engine_for, open_engine
from specbranch.plugins.vllm import compat
from specbranch.trace import write_trace

# Real runs against forecasts: docs/benchmarks.md. A gain that is smaller than this is not promised.
ERROR = 0.1
_ROWS = (1, 2, 4, 8)
_SIZES = (1, 2, 4, 8, 16)


def plan(
    target: Annotated[str, typer.Argument(help="A path, a name below $SPECBRANCH_MODELS, or a name on the hub.")],
    draft: Annotated[str, typer.Option(help="The draft model; as TARGET, or a GGUF file.")],
    draft_device: Annotated[str, typer.Option(help="cpu, cuda:0, gpu:1, mps: what the engine knows.")] = "cpu",
    draft_engine: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(ENGINES)}; by default what suits the draft.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Number format of the target.")] = "auto",
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL of your own prompts; by default 16 built-in ones.")
    ] = None,
    field: Annotated[str, typer.Option(help="Where the text stands in a line of --prompts.")] = "prompt",
    count: Annotated[int, typer.Option(help="How many of --prompts.", min=1)] = 16,
    answer: Annotated[int, typer.Option(help="Tokens of an answer at most.", min=8)] = 64,
    concurrency: Annotated[str, typer.Option(help="Requests at once to forecast, separated by commas.")] = "1,2,4,8,16",
    target_cores: Annotated[str | None, typer.Option(help="Cores of the target on a CPU, such as 0,1,2.")] = None,
    draft_cores: Annotated[str | None, typer.Option(help="Cores of the draft on a CPU, such as 3.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write everything to this JSON file as well.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write the recorded answers and distributions, for `specbranch simulate --trace`."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document as the last line of stdout.")] = False,
) -> None:
    """Measure the pair for a minute or two, forecast every planner with the simulator, and say what to do."""
    with friendly_errors(UsageError, PromptError, EngineError, WorkerError, OSError):
        if not compat.is_installed():
            raise UsageError("the target runs in vLLM: pip install 'specbranch[vllm]'")
        at_once = numbers("--concurrency", concurrency)
        if 0 in at_once:
            raise UsageError(f"--concurrency is {concurrency}; give numbers from 1 on")
        messages = MESSAGES if prompts is None else read_prompts("own", prompts, count, field)
        cores = divide_cores(draft_device, target_cores, draft_cores)
        worker_options = _worker_options(target, dtype, cores.target)
        before = os.sched_getaffinity(0)
        console = console_for(as_json)
        with tempfile.TemporaryDirectory(prefix="specbranch-plan-") as directory, progress_bar() as bar:
            task = bar.add_task("loading the target", total=None)
            with Worker(VLLM, worker_options, Path(directory) / "target.log") as worker:
                bar.update(task, description="loading the draft")
                if cores.draft is not None:
                    os.sched_setaffinity(0, cores.draft)
                threads = None if cores.draft is None else len(cores.draft)
                options = EngineOptions(draft, draft_device, threads)
                engine = open_engine(draft_engine or engine_for(draft), options)
                try:
                    survey = take_survey(
                        worker,
                        engine,
                        messages,
                        _SIZES,
                        _ROWS,
                        answer,
                        lambda stage: bar.update(task, description=stage),
                    )
                finally:
                    engine.shutdown()
                    os.sched_setaffinity(0, before)
            bar.update(task, description="simulating")
            advice = advise(survey, list(PLANNERS), at_once)
        _print(console, survey, advice)
        document = {
            "target": target,
            "draft": draft,
            "survey": survey.as_json(),
            **advice.as_json(),
            "provenance": provenance(),
        }
        if trace is not None:
            write_trace(trace, survey.trace)
        if out is not None:
            out.write_text(json.dumps(document, indent=1) + "\n")
        if as_json:
            print_json(document)


def _worker_options(target: str, dtype: str, cores: Any) -> dict[str, Any]:
    arguments = {
        "dtype": dtype,
        "max_model_len": 2048,
        "max_num_seqs": max(_SIZES),
        "enforce_eager": compat.runs_on_cpu(),
        "distributed_executor_backend": "uni",
        "enable_prefix_caching": False,
    }
    return {
        "model": target,
        "section": None,
        "speculative_config": None,
        "num_speculative_tokens": 0,
        "arguments": arguments,
        "cores": list(cores) if cores else None,
    }


def _print(console: Console, survey: Survey, advice: Advice) -> None:
    table = Table(title="forecast: speed over bare vLLM", box=None, padding=(0, 2, 0, 0))
    table.add_column("planner")
    for concurrency in advice.concurrencies:
        table.add_column(f"{concurrency} at once", justify="right")
    for planner in dict.fromkeys(forecast.method.planner for forecast in advice.forecasts):
        speeds = [one.speed for one in advice.forecasts if one.method.planner == planner]
        table.add_row(planner, *(f"{speed:.2f}" for speed in speeds))
    console.print(table)
    for line in _sentences(survey, advice):
        console.print(line, highlight=False, soft_wrap=True)


def _sentences(survey: Survey, advice: Advice) -> list[str]:
    terms, best, trace = advice.terms, advice.best_at(advice.concurrencies[0]), survey.trace
    many = max(survey.draft_s)
    lines = [
        f"measured: a target step takes {1e3 * survey.target_alone_s[1]:.0f} ms alone and "
        f"{1e3 * survey.target_beside_s:.0f} ms beside the draft; a draft step {1e3 * survey.draft_s[1]:.0f} ms with "
        f"one row and {1e3 * survey.draft_s[many]:.0f} ms with {many}: "
        f"c is {terms.c:.1f}",
        f"the target's token is the draft's first choice in {trace.match_share():.0%} of {trace.num_tokens} places, "
        f"among its first three in {trace.match_share(3):.0%}",
    ]
    if best.speed < 1 + ERROR:
        return [*lines, f"it does not pay: no planner is forecast to be {ERROR:.0%} faster than bare vLLM"]
    stop = advice.stops_at(ERROR)
    until = "at every number that was asked for" if stop is None else f"below {stop} requests at once"
    return [
        *lines,
        f"it pays: {_named(best)} at {best.speed:.2f} times the speed of bare vLLM, {best.speed / 2:.2f} for each of "
        "two devices",
        f"it pays {until}; beyond, the gate of `specbranch serve` turns it off by itself",
        f"a second draft device would make {advice.with_two_drafts:.2f} of it, and one draft for two such targets "
        f"{advice.with_shared_draft:.2f}",
        f"forecasts of speed are to be read as within {ERROR:.0%}; reading prompts is not in them",
    ]


def _named(forecast: Forecast) -> str:
    settings = " ".join(f"--set {key}={value}" for key, value in forecast.method.settings.items() if key == "gamma")
    return f"--planner {forecast.method.planner} {settings}".rstrip()
