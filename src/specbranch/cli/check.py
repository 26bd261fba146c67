"""`specbranch check`: does vLLM with the proposer emit what bare vLLM emits, on your own pair of models?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specbranch.cli.console import UsageError, console_for, friendly_errors, print_json, progress_bar
from specbranch.cli.cores import divide_cores
from specbranch.core.planners import PLANNERS, SettingError, setting_names
from specbranch.engines.registry import ENGINES
from specbranch.plugins.vllm.exactness.engine import EngineFailure
from specbranch.plugins.vllm.exactness.findings import FAILED, HOLDS, Finding
from specbranch.plugins.vllm.exactness.kit import FULL, QUICK, CheckOptions, Report, Size
from specbranch.plugins.vllm.exactness.kit import check as run_check
from specbranch.service.process import DraftOptions, StartError

_COLOURS = {HOLDS: "green", FAILED: "bold red"}


def check(
    target: Annotated[str, typer.Argument(help="A path, a name below $SPECBRANCH_MODELS, or a name on the hub.")],
    draft: Annotated[str, typer.Option(help="The draft model, as `specbranch draft --model` takes it.")],
    planner: Annotated[str, typer.Option(help=f"One of {', '.join(PLANNERS[1:])}.")] = "specbranch",
    predictor: Annotated[
        str, typer.Option(help="confidence, none, all, or the directory of one made by `specbranch train`.")
    ] = "confidence",
    all_planners: Annotated[bool, typer.Option("--all-planners", help="Greedy equality for every planner.")] = False,
    dtype: Annotated[str, typer.Option(help="The element type that you serve with, as vLLM takes it.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer prompts and samples: notices less.")] = False,
    prompts: Annotated[int | None, typer.Option(help="Greedy prompts.", min=1)] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of each greedy output.", min=2)] = None,
    samples: Annotated[int | None, typer.Option(help="Samples for each sampling feature.", min=2)] = None,
    alpha: Annotated[float, typer.Option(help="False-alarm rate of the whole report.")] = 1e-3,
    deadline_ms: Annotated[float, typer.Option(help="The longest that a step may wait for drafts.", min=1)] = 2000.0,
    draft_len: Annotated[int, typer.Option(help="Longest submission.", min=1)] = 4,
    draft_engine: Annotated[str | None, typer.Option(help=f"One of {', '.join(ENGINES)}.")] = None,
    draft_device: Annotated[str, typer.Option(help="Where the draft runs.")] = "cpu",
    target_cores: Annotated[str | None, typer.Option(help="Cores of the target, such as 0,1.")] = None,
    draft_cores: Annotated[str | None, typer.Option(help="Cores of the draft.")] = None,
    vllm_arguments: Annotated[str, typer.Option(help="Further arguments of vllm.LLM, as a JSON object.")] = "{}",
    seed: Annotated[int, typer.Option(help="Seed of the tests' own draws.")] = 0,
    report: Annotated[Path | None, typer.Option(help="Write the report to this Markdown file, too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document as the last line of stdout.")] = False,
    wrong_temperature: Annotated[float | None, typer.Option(hidden=True)] = None,
) -> None:
    """Compare vLLM with and without the proposer. Exit code 0: all holds; 1: something failed; 2: wrong options."""
    with friendly_errors(UsageError, SettingError, StartError, EngineFailure, ImportError, OSError):
        if not 0 < alpha < 1:
            raise UsageError(f"--alpha is {alpha}; give a number between 0 and 1")
        cores = divide_cores(draft_device, target_cores, draft_cores)
        log_level = ("--log-level", "warning")
        options = CheckOptions(
            target,
            DraftOptions(draft, draft_engine, draft_device, cores.draft, extra=log_level),
            _planners(planner, all_planners),
            dtype,
            draft_len,
            deadline_ms,
            alpha,
            seed,
            _size(quick, prompts, tokens, samples),
            cores.target,
            _arguments(vllm_arguments),
            wrong_temperature,
            predictor,
        )
        found = _run(options)
        console = console_for(as_json)
        _print_report(console, found, quick)
        if report is not None:
            report.write_text(_markdown(found))
            console.print(f"written to {report}")
        if as_json:
            print_json(found.as_json())
    if found.has_failed:
        raise typer.Exit(1)


def _planners(planner: str, all_planners: bool) -> list[str]:
    setting_names(planner)  # raises with the nearest known name
    if planner == "none":
        raise UsageError("--planner is none, which never drafts: nothing would be checked; choose another")
    others = [name for name in PLANNERS if name not in ("none", planner)] if all_planners else []
    return [planner, *others]


def _size(quick: bool, prompts: int | None, tokens: int | None, samples: int | None) -> Size:
    chosen = {"num_prompts": prompts, "num_tokens": tokens, "num_samples": samples}
    return replace(QUICK if quick else FULL, **{name: value for name, value in chosen.items() if value is not None})


def _arguments(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--vllm-arguments is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError("--vllm-arguments must be a JSON object, such as '{\"max_model_len\": 1024}'")
    return value


def _run(options: CheckOptions) -> Report:
    with progress_bar() as bar:
        task = bar.add_task("draft service starts", total=1)

        def listen(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total)

        return run_check(options, listen)


def _summary(report: Report) -> list[str]:
    options, size = report.options, report.options.size
    return [
        f"{size.num_prompts} greedy prompts of {size.num_tokens} tokens, {size.num_samples} samples for each feature.",
        f"p: adjusted for all distributions together; the whole report gives a false alarm with probability at most "
        f"{options.alpha:g}.",
        "shift: the total-variation distance between the distributions that is detected with probability 0.9, in the",
        "direction that is hardest to see.",
    ]


def _verdict(report: Report) -> str:
    failed = sum(finding.result == FAILED for finding in report.findings)
    return f"{failed} of {len(report.findings)} checks FAILED" if failed else "all checks hold"


def _p(finding: Finding) -> str:
    return "" if finding.p_value is None else f"{finding.p_value:.3g}"


def _print_report(console: Console, report: Report, quick: bool) -> None:
    options = report.options
    table = Table(title=escape(f"{options.target} with {options.draft.model}"), box=None, padding=(0, 1, 0, 0))
    for column in ("check", "compared", "n", "result", "p", ""):
        table.add_column(column, justify="right" if column in ("n", "p") else "left")
    for finding in report.findings:
        colour = _COLOURS.get(finding.result, "dim")
        cells = escape(finding.name), escape(finding.compared), str(finding.n)
        table.add_row(*cells, f"[{colour}]{finding.result}[/]", _p(finding), escape(finding.says))
    console.print(table)
    for finding in report.findings:
        for line in finding.details:
            console.print(f"{finding.name}: {line}", markup=False, highlight=False, soft_wrap=True)
    for line in _summary(report):
        console.print(line, highlight=False, soft_wrap=True)
    if quick:
        console.print("--quick: fewer samples notice less; run without it before you rely on the pair.")
    console.print(_verdict(report), style="bold")


def _markdown(report: Report) -> str:
    options = report.options
    versions = ", ".join(f"{name} {value}" for name, value in report.as_json()["versions"].items())
    rows = [
        " | ".join(
            ("", finding.name, finding.compared, str(finding.n), finding.result, _p(finding), finding.says, "")
        ).strip()
        for finding in report.findings
    ]
    details = [f"- {finding.name}: {line}" for finding in report.findings for line in finding.details]
    return "\n".join(
        [
            f"# {options.target} with {options.draft.model}: {_verdict(report)}",
            "",
            f"{versions}; planners {', '.join(options.planners)}.",
            "",
            "| check | compared | n | result | p | |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            *_summary(report),
            *(["", *details] if details else []),
            "",
        ]
    )
