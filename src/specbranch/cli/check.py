"""`specbranch check`: does vLLM with the proposer emit what bare vLLM emits, for your own pair of models?

With two servers in their place see `check_servers.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from specbranch.cli.check_servers import (
    ApiKeyEnv,
    Concurrency,
    Endpoint,
    EndpointModel,
    Pair,
    Reference,
    ReferenceModel,
    Tie,
    TimeoutS,
    compare_servers,
    names_servers,
    servers_page,
)
from specbranch.cli.console import console_for, friendly_errors, print_json, warn
from specbranch.cli.findings import Page
from specbranch.cli.options import (
    AsJson,
    DraftArg,
    DraftCores,
    DraftDevice,
    DraftDtype,
    DraftEngine,
    Dtype,
    OptionalDraft,
    OptionalTarget,
    Planner,
    Predictor,
    TargetCores,
    VllmArg,
    check_directory,
    draft_words,
    vllm_arguments,
)
from specbranch.cli.preflight import Preflight
from specbranch.cli.progress import Progress
from specbranch.core.planners import DEFAULT_PLANNER, planner_names, setting_names
from specbranch.errors import SpecBranchError, UsageError
from specbranch.exactness.server_check import CompareOptions, Comparison
from specbranch.exactness.vllm_check import FULL, QUICK, CheckOptions, Report, Size
from specbranch.exactness.vllm_check import check as run_check
from specbranch.launch.draft_process import DraftOptions
from specbranch.launch.placement import divide_cores, place_draft
from specbranch.plugins.vllm.layout import Layout


def _sizes(name: str) -> str:
    return f"Default: {getattr(FULL, name)}, or {getattr(QUICK, name)} with --quick."


def check(
    context: typer.Context,
    target: OptionalTarget = None,
    draft: OptionalDraft = None,
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
    endpoint: Endpoint = None,
    reference: Reference = None,
    model: EndpointModel = None,
    reference_model: ReferenceModel = None,
    tie: Tie = 0.25,
    concurrency: Concurrency = 8,
    timeout_s: TimeoutS = 300.0,
    api_key_env: ApiKeyEnv = None,
    wrong_temperature: Annotated[float | None, typer.Option(hidden=True)] = None,
) -> None:
    """Check on your own models that drafting does not change what vLLM emits.

    It runs vLLM with and without drafts. Greedy answers must be equal, with
    batch-invariant kernels or in float32; sampled answers must follow the same
    distribution. All other flags go to vLLM.
    With --endpoint and --reference it compares two servers that run already.
    Exit code 0: all checks hold; 1: a check failed; 2: wrong options.
    """
    with friendly_errors(SpecBranchError, ImportError, OSError):
        if not 0 < alpha < 1:
            raise UsageError(f"--alpha is {alpha}; give a number between 0 and 1")
        check_directory("--report", report)
        size = _size(quick, num_prompts, num_tokens, num_samples)
        if names_servers(context):
            pair = Pair(endpoint, reference, model, reference_model, timeout_s, api_key_env)
            compared = CompareOptions(size=size, alpha=alpha, seed=seed, tie=tie, at_once=concurrency)
            comparison = compare_servers(pair, compared)
            _report(comparison, servers_page(comparison), quick, report, as_json)
            return
        if target is None or draft is None:
            raise UsageError("name TARGET and --draft; or two servers, by --endpoint and --reference")
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
            size=size,
            target_cores=cores.target,
            arguments=arguments,
            wrong_temperature=wrong_temperature,
            predictor=predictor,
        )
        options.settings("ipc://unused")  # refuses what both sides set
        preflight(options).run()
        warn(device.warning)
        found = _run(options)
        _report(found, _page(found), quick, report, as_json)


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


def _report(found: Report | Comparison, page: Page, quick: bool, file: Path | None, as_json: bool) -> None:
    page.show(console_for(as_json), quick, file)
    if as_json:
        print_json(found.as_json())
    if found.has_failed:
        raise typer.Exit(1)


def _page(report: Report) -> Page:
    options = report.options
    versions = ", ".join(f"{name} {value}" for name, value in report.as_json()["versions"].items())
    return Page(
        title=f"{options.target} with {options.draft.model}",
        facts=f"{versions}; planners {', '.join(options.planners)}.",
        findings=report.findings,
        size=options.size,
        alpha=options.alpha,
    )
