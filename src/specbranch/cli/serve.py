"""`specbranch serve`: a draft service and `vllm serve` with our proposer, as one command; or bare vLLM."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specbranch.cli.console import UsageError, console_for, friendly_errors
from specbranch.cli.cores import divide_cores
from specbranch.cli.options import (
    DraftCores,
    DraftDevice,
    DraftDtype,
    DraftEngine,
    Gamma,
    OptionalDraft,
    Planner,
    Predictor,
    RecordFile,
    Settings,
    Target,
    TargetCores,
    TimelineFile,
    check_directory,
    refuse_misspelt,
)
from specbranch.cli.placement import Cores
from specbranch.cli.values import table
from specbranch.core.planners import SettingError
from specbranch.engines.options import found_model
from specbranch.engines.protocol import EngineError
from specbranch.engines.registry import engine_for
from specbranch.plugins.vllm.compat import launch
from specbranch.plugins.vllm.endpoint import Endpoint
from specbranch.plugins.vllm.flags import FlagError, Flags
from specbranch.plugins.vllm.server import VllmServer
from specbranch.plugins.vllm.serving import ServeOptions, merged_settings
from specbranch.plugins.vllm.settings import ProposerSettings
from specbranch.service.keeper import DraftKeeper
from specbranch.service.process import DraftOptions, StartError

FLAGS_GO_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}

_POLL_S = 0.3
_KILLED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """All that was asked for, before anything is started. Without a draft, vLLM is bare."""

    target: str
    draft: DraftOptions | None
    engine: str
    cores: Cores
    gamma: int
    section: dict[str, Any]
    flags: Flags
    on_cpu: bool

    def options(self, address: str | None) -> ServeOptions:
        """Options of vLLM; `address` is where the draft service listens, if there is one."""
        return ServeOptions(
            model=found_model(self.target),
            name=self.target,
            settings=None if address is None else merged_settings({"address": address, **self.section}, self.flags),
            num_speculative_tokens=self.gamma,
            flags=self.flags,
            cores=self.cores.target,
        )

    def settings(self) -> ProposerSettings:
        """The proposer's settings; raises now what vLLM's worker would raise minutes later."""
        settings = merged_settings(self.section, self.flags)
        settings.client_options(self.gamma)
        return settings


def serve(
    context: typer.Context,
    target: Target,
    draft: OptionalDraft = None,
    draft_device: DraftDevice = "cpu",
    draft_engine: DraftEngine = None,
    draft_dtype: DraftDtype = "auto",
    planner: Planner = "specbranch",
    gamma: Gamma = 8,
    settings: Settings = None,
    predictor: Predictor = "confidence",
    deadline_ms: Annotated[
        float | None,
        typer.Option(metavar="MS", help="Longest time that a target step waits for drafts. Default: 100.", min=0),
    ] = None,
    timeline: TimelineFile = None,
    record: RecordFile = None,
    target_cores: TargetCores = None,
    draft_cores: DraftCores = None,
    bare: Annotated[bool, typer.Option("--bare", help="Serve without a draft, on the same cores, to compare.")] = False,
) -> None:
    """Serve TARGET with vLLM's OpenAI-compatible server and speed it up with a draft model.

    All other flags go to `vllm serve` unchanged; `vllm serve --help` lists them.
    The server listens on port 8000 unless --port says otherwise.
    Ctrl-C stops target and draft.
    """
    with friendly_errors(UsageError, SettingError, FlagError, EngineError, StartError):
        if target.startswith("-"):
            raise UsageError(f"the first word is {target!r}; name TARGET first, then the flags")
        refuse_misspelt(context)
        if (draft is None) != bare:
            raise UsageError("give either --draft MODEL, or --bare to serve without a draft")
        if not launch.is_installed():
            raise UsageError("vLLM is not installed: pip install 'specbranch[vllm]'")
        section: dict[str, Any] = {"planner": planner, "settings": table("--set", settings), "predictor": predictor}
        if deadline_ms is not None:
            section["deadline_ms"] = deadline_ms
        cores = divide_cores("none" if bare else draft_device, target_cores, draft_cores)
        engine, options = "", None
        if draft is not None:
            engine = draft_engine or engine_for(draft)
            check_directory("--timeline", timeline)
            check_directory("--record", record)
            options = DraftOptions(
                model=draft,
                engine=engine,
                device=draft_device,
                dtype=draft_dtype,
                cores=cores.draft,
                timeline=timeline,
                record=record,
            )
        plan = _Plan(
            target=target,
            draft=options,
            engine=engine,
            cores=cores,
            gamma=gamma,
            section=section,
            flags=Flags(context.args),
            on_cpu=launch.runs_on_cpu(),
        )
        code = _run(plan, console_for(False))
    raise typer.Exit(code)


def _run(plan: _Plan, console: Console) -> int:
    """Start draft and target, watch them, stop them; returns the exit code."""
    settings, endpoint = plan.settings() if plan.draft else None, Endpoint.of(plan.flags)
    begin_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        keeper = DraftKeeper(plan.draft, say=lambda line: _say(console, line)) if plan.draft else None
        if keeper:
            stack.callback(keeper.stop)
        server = VllmServer(plan.options(keeper.address if keeper else None))
        stack.callback(server.kill)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            if keeper:
                keeper.start()
            console.print(_summary(plan, settings, keeper.address if keeper else None, endpoint))
            with _uninterrupted():
                server.start()
            return _watch(server, endpoint, begin_s, console)
        except KeyboardInterrupt:
            _say(console, "stopping; press Ctrl-C again to kill")
            return _stop(server, keeper)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM: a process that is being started would be left behind."""
    caught: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: caught.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if caught:
        raise KeyboardInterrupt


def _stop(server: VllmServer, keeper: DraftKeeper | None) -> int:
    try:
        server.stop()
        if keeper:
            keeper.stop()
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        server.kill()
        if keeper:
            keeper.kill()
        return _KILLED
    return 0


def _watch(server: VllmServer, endpoint: Endpoint, begin_s: float, console: Console) -> int:
    """Wait until vLLM ends; say once when it is ready."""
    is_ready = False
    while (code := server.returncode) is None:
        if not is_ready and endpoint.is_healthy():
            is_ready = True
            server.free_frontend()
            _say(console, f"ready in {time.monotonic() - begin_s:.0f} s")
        time.sleep(_POLL_S)
    _say(console, f"vLLM ended with code {code}")
    return code if code >= 0 else 128 - code


def _say(console: Console, line: str) -> None:
    console.print(f"[bold]specbranch:[/] {escape(line)}", highlight=False, soft_wrap=True)


def _summary(plan: _Plan, settings: ProposerSettings | None, address: str | None, endpoint: Endpoint) -> Table:
    table = Table.grid(padding=(0, 2))
    device = "CPU" if plan.on_cpu else "GPU"
    rows = {"target": f"{plan.target} on {device}, {_core_words(plan.cores.target)}"}
    if plan.draft and settings:
        planned = settings.client_options(plan.gamma).settings
        rows |= {
            "draft": f"{plan.draft.model} in {plan.engine} on {plan.draft.device}, {_core_words(plan.cores.draft)}",
            "planner": " ".join([settings.planner, *(f"{key}={value}" for key, value in planned.items())]),
            "deadline": f"{settings.deadline_ms:g} ms",
            "socket": address or "",
        }
    else:
        rows["draft"] = "none (bare vLLM)"
    rows["server"] = f"{endpoint} (loading; 'ready' follows)"
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/]", escape(value))
    return table


def _core_words(cores: Sequence[int] | None) -> str:
    if cores is None:
        return "not pinned"
    return f"{'core' if len(cores) == 1 else 'cores'} {','.join(str(core) for core in cores)}"
