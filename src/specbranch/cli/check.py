"""`specbranch check`: does vLLM with the proposer emit what bare vLLM emits, for your own pair of models?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specbranch.cli.console import UsageError, console_for, friendly_errors, print_json, warn
from specbranch.cli.cores import divide_cores, place_draft
from specbranch.cli.options import (
    AsJson,
    Draft,
    DraftArg,
    DraftCores,
    DraftDevice,
    DraftDtype,
    DraftEngine,
    Dtype,
    Planner,
    Predictor,
    Target,
    TargetCores,
    VllmArg,
    check_directory,
    draft_words,
    vllm_arguments,
)
from specbranch.cli.preflight import Preflight
from specbranch.cli.progress import Progress
from specbranch.core.planners import DEFAULT_PLANNER, planner_names, setting_names
from specbranch.errors import SpecBranchError
from specbranch.plugins.vllm.exactness.findings import FAILED, HOLDS, Finding
from specbranch.plugins.vllm.exactness.kit import FULL, QUICK, CheckOptions, Report, Size
from specbranch.plugins.vllm.exactness.kit import check as run_check
from specbranch.plugins.vllm.layout import Layout
from specbranch.service.process import DraftOptions

_COLOURS = {HOLDS: "green", FAILED: "bold red"}


def _sizes(name: str) -> str:
    return f"Default: {getattr(FULL, name)}, or {getattr(QUICK, name)} with --quick."


def check(
    context: typer.Context,
    target: Target,
    draft: Draft,
    planner: Planner = DEFAULT_PLANNER,
    predictor: Predictor = "confidence",
    all_planners: Annotated[
        bool, typer.Option("--all-planners", help="Also check greedy equality with every other planner.")
    ] = False,
    dtype: Dtype = "auto",
    quick: Annotated[
        bool, typer.Option("--quick", help="Use fewer prompts and samples; small errors may go unnoticed.")
    ] = False,
    num_prompts: Annotated[
        int | None, typer.Option(metavar="N", help=f"Greedy prompts. {_sizes('num_prompts')}", min=1)
    ] = None,
    num_tokens: Annotated[
        int | None, typer.Option(metavar="N", help=f"Tokens of each greedy answer. {_sizes('num_tokens')}", min=2)
    ] = None,
    num_samples: Annotated[
        int | None, typer.Option(metavar="N", help=f"Samples of each sampling feature. {_sizes('num_samples')}", min=2)
    ] = None,
    alpha: Annotated[
        float, typer.Option(metavar="P", help="Probability that a correct pair fails anywhere in the report.")
    ] = 1e-3,
    deadline_ms: Annotated[
        float, typer.Option(metavar="MS", help="Longest time that a target step waits for drafts.", min=1)
    ] = 2000.0,
    gamma: Annotated[
        int, typer.Option("--gamma", metavar="N", help="Most draft tokens that the target verifies at once.", min=1)
    ] = 4,
    draft_engine: DraftEngine = None,
    draft_device: DraftDevice = "auto",
    draft_dtype: DraftDtype = "auto",
    draft_arg: DraftArg = None,
    target_cores: TargetCores = None,
    draft_cores: DraftCores = None,
    vllm_arg: VllmArg = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the statistical tests.")] = 0,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the report, as Markdown.")] = None,
    as_json: AsJson = False,
    wrong_temperature: Annotated[float | None, typer.Option(hidden=True)] = None,
) -> None:
    """Check on your own models that drafting does not change what vLLM emits.

    It runs vLLM with and without drafts. Greedy answers must be equal, with
    batch-invariant kernels or in float32; sampled answers must follow the same
    distribution. All other flags go to vLLM.
    Exit code 0: all checks hold; 1: a check failed; 2: wrong options.
    """
    with friendly_errors(SpecBranchError, ImportError, OSError):
        if not 0 < alpha < 1:
            raise UsageError(f"--alpha is {alpha}; give a number between 0 and 1")
        check_directory("--report", report)
        arguments = vllm_arguments(context, vllm_arg)
        device = place_draft(draft_device, draft, draft_engine, Layout.of_arguments(arguments))
        cores = divide_cores(device.device, target_cores, draft_cores)
        options = CheckOptions(
            target=target,
            draft=DraftOptions(
                model=draft,
                engine=draft_engine,
                device=device.device,
                dtype=draft_dtype,
                cores=cores.draft,
                extra=["--log-level", "warning", *draft_words(draft_arg)],
            ),
            planners=_planners(planner, all_planners),
            dtype=dtype,
            num_speculative_tokens=gamma,
            deadline_ms=deadline_ms,
            alpha=alpha,
            seed=seed,
            size=_size(quick, num_prompts, num_tokens, num_samples),
            target_cores=cores.target,
            arguments=arguments,
            wrong_temperature=wrong_temperature,
            predictor=predictor,
        )
        options.settings("ipc://unused")  # refuses what both sides set
        preflight(options).run()
        warn(device.warning)
        found = _run(options)
        console = console_for(as_json)
        _print_report(console, found, quick)
        if report is not None:
            report.write_text(_markdown(found))
            console.print(f"wrote {report}", highlight=False)
        if as_json:
            print_json(found.as_json())
    if found.has_failed:
        raise typer.Exit(1)


def preflight(options: CheckOptions) -> Preflight:
    """What can be checked before a model loads."""
    return Preflight(
        target=options.target,
        draft=options.draft,
        arguments={"dtype": options.dtype, **options.arguments},
        target_cores=options.target_cores,
    )


def _planners(planner: str, all_planners: bool) -> list[str]:
    setting_names(planner)  # raises with the nearest known name
    if planner == "none":
        raise UsageError("--planner none never drafts, so nothing would be checked; choose another")
    others = [name for name in planner_names() if name not in ("none", planner)] if all_planners else []
    return [planner, *others]


def _size(quick: bool, prompts: int | None, tokens: int | None, samples: int | None) -> Size:
    chosen = {"num_prompts": prompts, "num_tokens": tokens, "num_samples": samples}
    return replace(QUICK if quick else FULL, **{name: value for name, value in chosen.items() if value is not None})


def _run(options: CheckOptions) -> Report:
    with Progress() as progress:
        progress.show("starting the draft service")
        return run_check(options, progress.show)


def _summary(report: Report) -> list[str]:
    options, size = report.options, report.options.size
    return [
        f"{size.num_prompts} greedy prompts of {size.num_tokens} tokens, {size.num_samples} samples of each feature.",
        f"p: p-value, corrected for all tests; a correct pair fails with probability {options.alpha:g} or less.",
        "shift: the total-variation distance between two distributions that is found with probability 0.9, in the",
        "direction that is hardest to see.",
    ]


def _verdict(report: Report) -> str:
    failed = sum(finding.result == FAILED for finding in report.findings)
    return f"{failed} of {len(report.findings)} checks FAILED" if failed else "all checks hold"


def _p(finding: Finding) -> str:
    return "" if finding.p_value is None else f"{finding.p_value:.3g}"


def _print_report(console: Console, report: Report, quick: bool) -> None:
    options = report.options
    title = f"{options.target} with {options.draft.model}: {_verdict(report)}"
    shown = Table(title=escape(title), box=None, padding=(0, 1, 0, 0))
    for column in ("check", "compared", "n", "result", "p", ""):
        shown.add_column(column, justify="right" if column in ("n", "p") else "left")
    for finding in report.findings:
        colour = _COLOURS.get(finding.result, "dim")
        cells = escape(finding.name), escape(finding.compared), str(finding.n)
        shown.add_row(*cells, f"[{colour}]{finding.result}[/]", _p(finding), escape(finding.says))
    console.print(shown)
    for finding in report.findings:
        for line in finding.details:
            console.print(f"{finding.name}: {line}", markup=False, highlight=False, soft_wrap=True)
    for line in _summary(report):
        console.print(line, highlight=False, soft_wrap=True)
    if quick:
        console.print("--quick misses small errors; run without it before you rely on this pair.")
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
