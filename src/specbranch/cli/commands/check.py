"""`specbranch check`: compare the output of vLLM with the plugin and of bare vLLM, or of any two servers.

The findings are printed as a table with explanations, or written as Markdown.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specbranch.cli.console import ProgressBar, console_for, friendly_errors, print_json, warn
from specbranch.cli.options import (
    GAMMA,
    GAMMA_HELP,
    AsJson,
    DraftArg,
    DraftCores,
    DraftDevice,
    DraftDtype,
    DraftEngineName,
    Dtype,
    OptionalDraft,
    OptionalTarget,
    Planner,
    Predictor,
    TargetCores,
    VllmArg,
    check_directory,
    check_typos,
    draft_arguments,
    vllm_arguments,
)
from specbranch.cli.preflight import Preflight
from specbranch.core.planners import DEFAULT_PLANNER, planner_names, setting_names
from specbranch.errors import SpecBranchError, UsageError
from specbranch.exactness.openai_server import Address, OpenAIServer
from specbranch.exactness.server_check import CompareOptions, Comparison, compare
from specbranch.exactness.vllm_check import FULL, QUICK, CheckOptions, CheckSize, Report
from specbranch.exactness.vllm_check import check as run_check
from specbranch.exactness.vllm_findings import FAILED, HOLDS, SKIPPED, Finding
from specbranch.launch.draft_process import DraftServiceOptions, place_pair
from specbranch.plugins.vllm.settings import ParallelLayout
from specbranch.version import __version__

_PANEL = "Two servers"
_OWN = ("endpoint", "reference", "model", "reference_model", "tie", "concurrency", "timeout_s", "api_key_env")
_SHARED = ("quick", "num_prompts", "num_tokens", "num_samples", "alpha", "seed", "report", "as_json")
Endpoint = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Instead of TARGET: an OpenAI-compatible server with speculative decoding, such as vLLM, SGLang or "
        "llama.cpp.",
        rich_help_panel=_PANEL,
    ),
]
Reference = Annotated[
    str | None,
    typer.Option(metavar="URL", help="The same server without speculative decoding.", rich_help_panel=_PANEL),
]
EndpointModel = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", help="Model of --endpoint. Default: its only one.", rich_help_panel=_PANEL),
]
ReferenceModel = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Model of --reference. Default: its only one.", rich_help_panel=_PANEL),
]
Tie = Annotated[
    float,
    typer.Option(
        metavar="GAP",
        help="Greedy answers may differ where the reference preferred its token by at most this, in log-probability: "
        "in bfloat16 rounding decides there. For float32: 1e-5.",
        min=0,
        rich_help_panel=_PANEL,
    ),
]
Concurrency = Annotated[
    int,
    typer.Option(metavar="N", help="Maximum concurrent requests to a server.", min=1, rich_help_panel=_PANEL),
]
TimeoutS = Annotated[
    float, typer.Option(metavar="S", help="Maximum time for one answer.", min=0.1, rich_help_panel=_PANEL)
]
ApiKeyEnv = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Environment variable that holds the API key of both servers.",
        rich_help_panel=_PANEL,
    ),
]
_COLOURS = {HOLDS: "green", FAILED: "bold red"}
_COLUMNS = ("check", "compared", "n", "result", "p", "")


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
        float, typer.Option(metavar="MS", help="Maximum time that a target step waits for drafts.", min=1)
    ] = 2000.0,
    gamma: Annotated[int, typer.Option(*GAMMA, metavar="N", help=GAMMA_HELP, min=1)] = 4,
    draft_engine: DraftEngineName = None,
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
        if is_server_mode(context):
            pair = ServerPair(endpoint, reference, model, reference_model, timeout_s, api_key_env)
            compared = CompareOptions(size=size, alpha=alpha, seed=seed, tie=tie, at_once=concurrency)
            comparison = compare_servers(pair, compared)
            _report(comparison, servers_page(comparison), quick, report, as_json)
            return
        if target is None or draft is None:
            raise UsageError("name TARGET and --draft; or two servers, by --endpoint and --reference")
        arguments = vllm_arguments(context, vllm_arg)
        extra = ["--log-level", "warning", *draft_arguments(draft_arg)]
        how = DraftServiceOptions(draft, engine=draft_engine, device=draft_device, dtype=draft_dtype, extra=extra)
        place = place_pair(how, ParallelLayout.of_arguments(arguments), target_cores, draft_cores)
        assert place.draft is not None, "a draft was given"
        options = CheckOptions(
            target=target,
            draft=place.draft,
            planners=_planners(planner, all_planners),
            dtype=dtype,
            num_speculative_tokens=gamma,
            deadline_ms=deadline_ms,
            alpha=alpha,
            seed=seed,
            size=size,
            target_cores=place.target_cores,
            arguments=arguments,
            wrong_temperature=wrong_temperature,
            predictor=predictor,
        )
        options.settings("ipc://unused")  # raises for settings that both sides set
        preflight(options).run()
        warn(place.warning)
        found = _run(options)
        _report(found, _page(found), quick, report, as_json)


def preflight(options: CheckOptions) -> Preflight:
    """Return the checks to run before a model loads."""
    return Preflight(
        target=options.target,
        draft=options.draft,
        arguments={"dtype": options.dtype, **options.arguments},
        target_cores=options.target_cores,
    )


def _planners(planner: str, all_planners: bool) -> list[str]:
    setting_names(planner)  # raises with the most similar known name
    if planner == "none":
        raise UsageError("--planner none never drafts, so nothing would be checked; choose another")
    others = [name for name in planner_names() if name not in ("none", planner)] if all_planners else []
    return [planner, *others]


def _size(quick: bool, prompts: int | None, tokens: int | None, samples: int | None) -> CheckSize:
    chosen = {"num_prompts": prompts, "num_tokens": tokens, "num_samples": samples}
    return replace(QUICK if quick else FULL, **{name: value for name, value in chosen.items() if value is not None})


def _run(options: CheckOptions) -> Report:
    with ProgressBar() as progress:
        progress.show("starting the draft service")
        return run_check(options, progress.show)


def _report(found: Report | Comparison, page: CheckReport, quick: bool, file: Path | None, as_json: bool) -> None:
    page.show(console_for(as_json), quick, file)
    if as_json:
        print_json(found.as_json())
    if found.has_failed:
        raise typer.Exit(1)


def _page(report: Report) -> CheckReport:
    options = report.options
    versions = ", ".join(f"{name} {value}" for name, value in report.as_json()["versions"].items())
    return CheckReport(
        title=f"{options.target} with {options.draft.model}",
        facts=f"{versions}; planners {', '.join(options.planners)}.",
        findings=report.findings,
        size=options.size,
        alpha=options.alpha,
    )


@dataclass(frozen=True, slots=True)
class ServerPair:
    """The command's options that name the two servers to compare, their models, and how to connect."""

    endpoint: str | None
    reference: str | None
    model: str | None = None
    reference_model: str | None = None
    timeout_s: float = 300.0
    api_key_env: str | None = None

    def opened(self) -> tuple[OpenAIServer, OpenAIServer]:
        """Connect to both servers and return them, the endpoint first; raise `UsageError` if an option is missing."""
        if self.endpoint is None or self.reference is None:
            raise UsageError("give both: --endpoint, the server to check, and --reference, the one without drafts")
        key = self._key()
        endpoint = Address("--endpoint", self.endpoint, key, self.timeout_s)
        reference = Address("--reference", self.reference, key, self.timeout_s)
        if endpoint.base == reference.base and self.model == self.reference_model:
            warn("--endpoint and --reference are the same server, which is compared with itself")
        return OpenAIServer(endpoint, self.model), OpenAIServer(reference, self.reference_model)

    def _key(self) -> str | None:
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env)
        if not key:
            raise UsageError(f"--api-key-env is {self.api_key_env}, but no such environment variable is set")
        return key


def is_server_mode(context: typer.Context) -> bool:
    """Return whether the command was given two servers instead of a pair of models.

    Raise `UsageError` if options for servers and for a pair of models are mixed, or if one looks misspelled.
    """
    given = [name for name in context.params if _is_given(context, name)]
    own = [name for name in given if name in _OWN]
    if "endpoint" not in given and "reference" not in given:
        if own:
            raise UsageError(f"{_shown(context, own[0])} belongs to --endpoint and --reference, which are missing")
        return False
    words = [context.params["target"], *context.args] if "target" in given else context.args
    check_typos(context, [word for word in words if word.startswith("-")])
    wrong = [_shown(context, name) for name in given if name not in (*_OWN, *_SHARED, "target")]
    if words or wrong:
        raise UsageError(f"{[*words, *wrong][0]} does not go with --endpoint and --reference; leave it out")
    return True


def compare_servers(pair: ServerPair, options: CompareOptions) -> Comparison:
    """Connect to both servers and return the comparison of their answers; show progress meanwhile."""
    with ProgressBar() as progress:
        progress.show("connecting")
        return compare(*pair.opened(), options, progress.show)


def servers_page(found: Comparison) -> CheckReport:
    """Return the comparison of two servers as a report to print or write."""
    names = " and ".join(dict.fromkeys((found.endpoint["model"], found.reference["model"])))
    return CheckReport(
        title=f"{found.endpoint['url']} against {found.reference['url']}",
        facts=f"specbranch {__version__}; {names}.",
        findings=found.findings,
        size=found.options.size,
        alpha=found.options.alpha,
    )


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _shown(context: typer.Context, name: str) -> str:
    return next(parameter.opts[0] for parameter in context.command.params if parameter.name == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """A report to print or write: the findings of a check, what it compared, and how much was decoded.

    `facts` is a line on versions and models; `alpha` is the highest probability that a correct pair fails.
    """

    title: str
    facts: str
    findings: Sequence[Finding]
    size: CheckSize
    alpha: float

    @property
    def verdict(self) -> str:
        """The result of all findings in a few words."""
        results = [finding.result for finding in self.findings]
        failed, skipped = results.count(FAILED), results.count(SKIPPED)
        says = f"{failed} of {len(results)} checks FAILED" if failed else "all checks hold"
        return f"{says}, {skipped} skipped" if skipped else says

    def show(self, console: Console, quick: bool, file: Path | None) -> None:
        """Print the report, with a warning if the check was `quick`; also write it to `file` as Markdown, if given."""
        console.print(self._table())
        for line in (*self._details(), *self._notes()):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        if quick:
            console.print("--quick misses small errors; run without it before you rely on this pair.")
        console.print(self.verdict, style="bold")
        if file is not None:
            file.write_text(self.markdown())
            console.print(f"wrote {file}", markup=False, highlight=False, soft_wrap=True)

    def markdown(self) -> str:
        """Return the report as Markdown."""
        details = [f"- {line}" for line in self._details()]
        return "\n".join(
            [
                f"# {self.title}: {self.verdict}",
                "",
                self.facts,
                "",
                f"| {' | '.join(_COLUMNS)} |",
                "|---" * len(_COLUMNS) + "|",
                *(f"| {' | '.join(_cells(finding))} |" for finding in self.findings),
                "",
                *self._notes(),
                *(["", *details] if details else []),
                "",
            ]
        )

    def _table(self) -> Table:
        shown = Table(title=escape(f"{self.title}: {self.verdict}"), box=None, padding=(0, 1, 0, 0))
        for column in _COLUMNS:
            shown.add_column(column, justify="right" if column in ("n", "p") else "left")
        for finding in self.findings:
            cells = [escape(cell) for cell in _cells(finding)]
            cells[_COLUMNS.index("result")] = f"[{_COLOURS.get(finding.result, 'dim')}]{finding.result}[/]"
            shown.add_row(*cells)
        return shown

    def _details(self) -> list[str]:
        return [f"{finding.name}: {line}" for finding in self.findings for line in finding.details]

    def _notes(self) -> list[str]:
        size = self.size
        return [
            f"{size.num_prompts} greedy prompts of {size.num_tokens} tokens, "
            f"{size.num_samples} samples of each feature.",
            f"p: p-value, corrected for all tests; a correct pair fails with probability {self.alpha:g} or less.",
            "shift: the total-variation distance between two distributions that is found with probability 0.9, in the",
            "direction that is hardest to see.",
        ]


def _cells(finding: Finding) -> list[str]:
    p_value = "" if finding.p_value is None else f"{finding.p_value:.3g}"
    return [finding.name, finding.compared, str(finding.n), finding.result, p_value, finding.says]
