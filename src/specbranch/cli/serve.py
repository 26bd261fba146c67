"""`specbranch serve`: a draft service and `vllm serve` with our proposer, started and stopped as one; or bare vLLM."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specbranch.cli.console import UsageError, console_for, friendly_errors
from specbranch.cli.cores import divide_cores
from specbranch.cli.values import table
from specbranch.core.planners import PLANNERS, SettingError
from specbranch.engines.options import found_model
from specbranch.engines.protocol import EngineError
from specbranch.engines.registry import ENGINES, engine_for
from specbranch.plugins.vllm import compat
from specbranch.plugins.vllm.cores import Cores
from specbranch.plugins.vllm.flags import FlagError, Flags
from specbranch.plugins.vllm.serving import Endpoint, ServeOptions, VllmServer
from specbranch.plugins.vllm.settings import ProposerSettings, read_settings
from specbranch.service.keeper import DraftKeeper
from specbranch.service.process import DraftOptions, StartError

FLAGS_GO_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}

_LOOK_S = 0.3
_KILLED = 130


@dataclass(frozen=True, slots=True)
class _Plan:
    """All that was asked for, checked, before anything is started. Without a draft vLLM is bare."""

    target: str
    draft: DraftOptions | None
    engine: str
    cores: Cores
    gamma: int
    section: dict[str, Any]
    flags: Flags
    on_cpu: bool

    def options(self, address: str | None) -> ServeOptions:
        """What vLLM is started with, once it is known where the draft service listens, if there is one."""
        section = None if address is None else {"address": address, **self.section}
        return ServeOptions(found_model(self.target), self.target, section, self.gamma, self.flags, self.cores.target)

    def settings(self) -> ProposerSettings:
        """The proposer's settings; raises for what vLLM's worker would refuse much later."""
        table, _ = self.flags.take_json("--additional-config")
        theirs = table.get("specbranch", {})
        settings = read_settings({**theirs, **self.section} if isinstance(theirs, dict) else theirs)
        settings.client_options(self.gamma)
        return settings


def serve(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="A path, a name below $SPECBRANCH_MODELS, or a name on the hub.")],
    draft: Annotated[str | None, typer.Option(help="The draft model; as TARGET, or a GGUF file.")] = None,
    draft_device: Annotated[str, typer.Option(help="cpu, cuda:0, gpu:1, mps: what the engine knows.")] = "cpu",
    draft_engine: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(ENGINES)}; by default what suits the draft.")
    ] = None,
    planner: Annotated[str, typer.Option(help=f"One of {', '.join(PLANNERS)}.")] = "specbranch",
    gamma: Annotated[int, typer.Option(help="The longest submission.", min=1)] = 8,
    settings: Annotated[list[str] | None, typer.Option("--set", help="A setting of the planner: KEY=VALUE.")] = None,
    predictor: Annotated[
        str, typer.Option(help="confidence, none, all, or the directory of one made by `specbranch train`.")
    ] = "confidence",
    deadline_ms: Annotated[
        float | None, typer.Option(help="The longest that a step may wait for drafts.", min=0)
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto and `specbranch timeline`.")] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Write every verdict and the draft's distributions here, for replay and training."),
    ] = None,
    target_cores: Annotated[str | None, typer.Option(help="Cores of the target on a CPU, such as 0,1,2.")] = None,
    draft_cores: Annotated[str | None, typer.Option(help="Cores of the draft on a CPU, such as 3.")] = None,
    bare: Annotated[bool, typer.Option("--bare", help="vLLM as it is, on the same cores: to compare with.")] = False,
) -> None:
    """Serve TARGET with vLLM and let DRAFT draft for it. Every other flag goes to `vllm serve` as it is."""
    with friendly_errors(UsageError, SettingError, FlagError, EngineError, StartError):
        if target.startswith("-"):
            raise UsageError(f"the first word is {target!r}; name TARGET first, then the flags")
        if (draft is None) != bare:
            raise UsageError("give either --draft with a model, or --bare for vLLM without one")
        if not compat.is_installed():
            raise UsageError("vLLM is not installed; pip install 'specbranch[vllm]'")
        section: dict[str, Any] = {
            "planner": planner,
            "settings": table("--set", settings),
            "predictor": predictor,
        }
        if deadline_ms is not None:
            section["deadline_ms"] = deadline_ms
        on_cpu = compat.runs_on_cpu()
        cores = divide_cores("none" if bare else draft_device, target_cores, draft_cores)
        engine, options = "", None
        if draft is not None:
            engine = draft_engine or engine_for(draft)
            extra = [
                word
                for flag, path in (("--trace", trace), ("--record", record))
                if path
                for word in (flag, str(path.absolute()))
            ]
            options = DraftOptions(draft, engine, draft_device, cores.draft, extra=extra)
        plan = _Plan(target, options, engine, cores, gamma, section, Flags(context.args), on_cpu)
        code = _run(plan, console_for(False))
    raise typer.Exit(code)


def _run(plan: _Plan, console: Console) -> int:
    """Start both, watch them, stop both; returns the exit code."""
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
            _say(console, "stopping; once more to kill")
            return _stop(server, keeper)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait: a process that is being started would be nobody's."""
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
    """Wait for vLLM's end; say once when it answers."""
    is_ready = False
    while (code := server.returncode) is None:
        if not is_ready and endpoint.is_healthy():
            is_ready = True
            server.free_frontend()
            _say(console, f"ready in {time.monotonic() - begin_s:.0f} s")
        time.sleep(_LOOK_S)
    _say(console, f"vLLM ended with code {code}")
    return code if code >= 0 else 128 - code


def _say(console: Console, line: str) -> None:
    console.print(f"[bold]specbranch:[/] {escape(line)}", highlight=False, soft_wrap=True)


def _summary(plan: _Plan, settings: ProposerSettings | None, address: str | None, endpoint: Endpoint) -> Table:
    table = Table.grid(padding=(0, 2))
    place = "the CPU" if plan.on_cpu else "GPU"
    rows = {"target": f"{plan.target} on {place}, {_core_words(plan.cores.target)}"}
    if plan.draft and settings:
        planned = settings.client_options(plan.gamma).settings
        rows |= {
            "draft": f"{plan.draft.model} by {plan.engine} on {plan.draft.device}, {_core_words(plan.cores.draft)}",
            "planner": " ".join([settings.planner, *(f"{key}={value}" for key, value in planned.items())]),
            "deadline": f"{settings.deadline_ms:g} ms",
            "socket": address or "",
        }
    else:
        rows["draft"] = "none: vLLM is bare"
    rows["server"] = str(endpoint)
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/]", escape(value))
    return table


def _core_words(cores: Sequence[int] | None) -> str:
    if cores is None:
        return "not pinned"
    return f"{'core' if len(cores) == 1 else 'cores'} {','.join(str(core) for core in cores)}"
