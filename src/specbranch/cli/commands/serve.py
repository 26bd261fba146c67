"""`specbranch serve`: start `vllm serve` with our proposer, and a draft service if a draft is named; or bare vLLM."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specbranch.cli.console import ProgressBar, console_for, friendly_errors, warn
from specbranch.cli.options import (
    DraftAddress,
    DraftArg,
    DraftCores,
    DraftDevice,
    DraftDtype,
    DraftEngineName,
    DraftKeys,
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
    check_flag_typos,
    draft_arguments,
    may_take_turns,
    parse_key_values,
    remote_draft,
)
from specbranch.cli.preflight import Preflight
from specbranch.core.planners import DEFAULT_PLANNER, draft_length_limit
from specbranch.engines.models import resolve_model
from specbranch.engines.registry import engine_for
from specbranch.errors import SpecBranchError, UsageError
from specbranch.launch.child import name_cores
from specbranch.launch.draft_process import DraftProcess, DraftServiceOptions, RemoteDraft, place_pair
from specbranch.launch.vllm_flags import Flags, layout_of
from specbranch.launch.vllm_install import slow_type_here
from specbranch.launch.vllm_server import HttpEndpoint, VllmServeCommand, VllmServer
from specbranch.plugins.vllm import installed
from specbranch.plugins.vllm.settings import ProposerSettings, merged_settings
from specbranch.service.wire.addresses import normalize_addresses

_POLL_S = 0.3
_KILLED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """All options of the command, before anything starts.

    Without a local or remote draft, drafts come from n-gram lookup in the text; with `is_bare`, vLLM runs without our
    proposer.
    """

    target: str
    draft: DraftServiceOptions | None
    remote: RemoteDraft | None
    is_bare: bool
    target_cores: Sequence[int] | None
    gamma: int
    section: dict[str, Any]
    flags: Flags

    def options(self, address: str | None) -> VllmServeCommand:
        """Return vLLM's command; `address` is that of the draft service to be started here, if any."""
        where = self.remote.section if self.remote else {"address": address}
        return VllmServeCommand(
            model=resolve_model(self.target),
            name=self.target,
            settings=self._merged(where) if self.is_drafting else None,
            num_speculative_tokens=self.gamma,
            flags=self.flags,
            cores=self.target_cores,
        )

    def check(self) -> None:
        """Check settings, flags and all of `Preflight` before a model loads; raise the first error."""
        if self.is_drafting:
            self.settings()
        self.options("ipc://unused" if self.draft else None)  # raises for flags that this command sets itself
        Preflight(
            target=self.target,
            draft=self.draft,
            remote=self.remote,
            has_text_drafts=self.is_drafting,
            flags=self.flags,
            is_server=True,
        ).run()

    @property
    def is_drafting(self) -> bool:
        """Whether vLLM runs with our proposer: there is a draft, or drafts come from n-gram lookup in the text."""
        return not self.is_bare

    def settings(self) -> ProposerSettings:
        """Return the proposer's settings after checking them: invalid ones raise here, before vLLM is started."""
        settings = self._merged(self.remote.section if self.remote else {} if self.draft else {"address": None})
        settings.checked_settings(self.gamma)
        return settings

    def _merged(self, where: Mapping[str, Any]) -> ProposerSettings:
        return merged_settings({**where, **self.section}, self.flags.take_json("--additional-config")[0])


def serve(
    context: typer.Context,
    target: Target,
    draft: OptionalDraft = None,
    draft_device: DraftDevice = "auto",
    draft_engine: DraftEngineName = None,
    draft_dtype: DraftDtype = "auto",
    draft_arg: DraftArg = None,
    draft_address: DraftAddress = None,
    draft_keys: DraftKeys = None,
    planner: Planner = DEFAULT_PLANNER,
    gamma: Gamma = None,
    settings: Settings = None,
    predictor: Predictor = "confidence",
    deadline_ms: Annotated[
        float | None,
        typer.Option(metavar="MS", help="Maximum time that a target step waits for drafts. Default: 100.", min=0),
    ] = None,
    timeline: TimelineFile = None,
    record: RecordFile = None,
    target_cores: TargetCores = None,
    draft_cores: DraftCores = None,
    no_gate: Annotated[
        bool, typer.Option("--no-gate", help="Always draft, even at loads where drafts were measured not to help.")
    ] = False,
    bare: Annotated[bool, typer.Option("--bare", help="Serve with vLLM without drafts, to compare.")] = False,
) -> None:
    """Serve TARGET with vLLM's OpenAI-compatible server and speed it up with a draft model.

    Without --draft and --draft-address, drafts come from the text: what followed the same few tokens before.
    All other flags go to `vllm serve` unchanged; `vllm serve --help` lists them.
    The server listens on port 8000 unless --port says otherwise.
    Ctrl-C stops target and draft.
    """
    with friendly_errors(SpecBranchError):
        check_flag_typos(context)
        if [draft is not None, bool(draft_address), bare].count(True) > 1:
            raise UsageError("give only one of --draft MODEL, --draft-address ADDRESS and --bare")
        section: dict[str, Any] = {
            "planner": planner,
            "settings": parse_key_values("--set", settings),
            "predictor": predictor,
        }
        if deadline_ms is not None:
            section["deadline_ms"] = deadline_ms
        if no_gate:
            section["is_gated"] = False
        if draft is None and (timeline or record):
            raise UsageError(
                "--timeline and --record belong to the draft service that --draft starts; give them to "
                "`specbranch draft`, where the draft service was started"
            )
        flags = Flags(context.args)
        options = None
        if draft is not None:
            check_directory("--timeline", timeline)
            check_directory("--record", record)
            options = DraftServiceOptions(
                model=draft,
                engine=draft_engine or engine_for(draft),
                device=draft_device,
                dtype=draft_dtype,
                timeline=timeline,
                record=record,
                extra=draft_arguments(draft_arg),
            )
        turns = may_take_turns(planner, section["settings"])
        place = place_pair(options, layout_of(flags), target_cores, draft_cores, may_take_turns=turns)
        plan = _Plan(
            target=target,
            draft=place.draft,
            remote=remote_draft(draft_address, draft_keys),
            is_bare=bare,
            target_cores=place.target_cores,
            gamma=gamma or draft_length_limit(planner),
            section=place.with_turns(section),
            flags=flags,
        )
        plan.check()
        warn(place.warning)
        if plan.is_drafting:
            warn(slow_type_here(target, flags.value("--dtype")))
        code = _run(plan, console_for(False))
    raise typer.Exit(code)


def _run(plan: _Plan, console: Console) -> int:
    """Start draft and target, wait until vLLM ends or Ctrl-C, stop both, and return the command's exit code."""
    settings, endpoint = plan.settings() if plan.is_drafting else None, HttpEndpoint.of(plan.flags)
    status = _StatusLine(console)
    with contextlib.ExitStack() as stack:
        draft = DraftProcess(plan.draft, on_progress=status.progress, on_event=status.event) if plan.draft else None
        if draft:
            stack.callback(draft.stop)
        server = VllmServer(plan.options(draft.address if draft else None), show=status.log_line)
        stack.callback(server.kill)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            console.print(_summary(plan, settings, draft.address if draft else None, endpoint))
            with status.starting():
                if draft:
                    draft.start()  # before the target, whose memory is limited to what the draft leaves free
                with _uninterrupted():
                    server.start()
                code = _await_ready(server, endpoint, status)
            return _watch(server, status) if code is None else _failed(server, code, status)
        except KeyboardInterrupt:
            status.event("stopping; press Ctrl-C again to kill")
            return _stop(server, draft)


class _StatusLine:
    """The terminal output of the command: events, progress and vLLM's log lines; it also measures the start-up time."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: ProgressBar | None = None
        self._begin_s = time.monotonic()

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Show a progress line with the stages of the start."""
        with ProgressBar() as progress:
            self._progress = progress
            try:
                yield
            finally:
                self._progress = None

    def elapsed_s(self) -> float:
        """Return the seconds since the command began."""
        return time.monotonic() - self._begin_s

    def event(self, line: str) -> None:
        """Print one line about the command's own progress, after the word "specbranch:"."""
        self._console.print(f"[bold]specbranch:[/] {escape(line)}", highlight=False, soft_wrap=True)

    def progress(self, stage: str) -> None:
        """Show the current stage of the start; do nothing outside `starting`."""
        if self._progress is not None:
            self._progress.show(stage)

    def log_line(self, line: str) -> None:
        """Print one line of vLLM's log."""
        progress = self._progress  # another thread sets it
        if progress is not None:
            progress.print(line)
        else:
            typer.echo(line, err=True)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM, which would orphan a process that is being started, to the end of the `with` block.

    Then raise `KeyboardInterrupt` if a signal has come.
    """
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


def _stop(server: VllmServer, draft: DraftProcess | None) -> int:
    try:
        server.stop()
        if draft:
            draft.stop()
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        server.kill()
        if draft:
            draft.kill()
        return _KILLED
    return 0


def _await_ready(server: VllmServer, endpoint: HttpEndpoint, status: _StatusLine) -> int | None:
    """Wait until vLLM is ready and return None, or return its exit code if it ends before.

    When it is ready, let its HTTP process use all cores, and discard the errors that it has logged so far.
    """
    while (code := server.returncode) is None:
        if endpoint.is_healthy() or server.is_up:
            server.unpin_frontend()
            server.clear_failures()
            return None
        status.progress(server.stage)
        time.sleep(_POLL_S)
    return code


def _failed(server: VllmServer, code: int, status: _StatusLine) -> int:
    status.event(f"vLLM did not start: {server.cause()}")
    return _exit_code(code)


def _watch(server: VllmServer, status: _StatusLine) -> int:
    """Print that vLLM is ready, wait until it ends, and print its exit code or the cause of its end.

    Return the command's exit code.
    """
    status.event(f"ready in {status.elapsed_s():.0f} s")
    while (code := server.returncode) is None:
        time.sleep(_POLL_S)
    status.event(f"vLLM ended with code {code}" if code == 0 else f"vLLM ended: {server.cause()}")
    return _exit_code(code)


def _exit_code(code: int) -> int:
    """Return a process's return code as shells do: 128 plus the number of the signal that ended it, if one did."""
    return code if code >= 0 else 128 - code


def _summary(plan: _Plan, settings: ProposerSettings | None, address: str | None, endpoint: HttpEndpoint) -> Table:
    table = Table.grid(padding=(0, 2))
    device = "CPU" if installed.runs_on_cpu() else "GPU"
    rows = {"target": f"{plan.target} on {device}, {name_cores(plan.target_cores)}"}
    if settings:
        planned = settings.checked_settings(plan.gamma)
        rows["draft" if settings.address else "drafts"] = _describe_draft(plan)
        rows["planner"] = " ".join([settings.planner, *(f"{key}={value}" for key, value in planned.items())])
        if settings.address is not None:
            rows["deadline"] = f"{settings.deadline_ms:g} ms"
            rows["socket"] = address or ", ".join(normalize_addresses(settings.address))
    else:
        rows["draft"] = "none (vLLM without drafts)"
    rows["server"] = f"{endpoint} (loading; 'ready' follows)"
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/]", escape(value))
    return table


def _describe_draft(plan: _Plan) -> str:
    if plan.draft:
        return f"{plan.draft.model} in {plan.draft.engine} on {plan.draft.device}, {name_cores(plan.draft.cores)}"
    if plan.remote is None:
        return "from the text (no draft model)"
    models = dict.fromkeys(welcome.model for welcome in plan.remote.check())
    return f"{', '.join(models)}, already running" if models else "not running now; vLLM starts without it"
