"""`specbranch draft`: the draft service as a process of its own; `specbranch keys`: the keys it needs for TCP."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from specbranch.cli.console import UsageError, console_for, friendly_errors
from specbranch.cli.cores import stay_on
from specbranch.engines.options import DTYPES, EngineOptions
from specbranch.engines.protocol import EngineError
from specbranch.engines.registry import ENGINES, engine_for, open_engine
from specbranch.service.endpoint import EndpointError, ServiceKeys, default_address, make_keys
from specbranch.service.logs import set_up_logs
from specbranch.service.metrics import serve_metrics
from specbranch.service.observer import Observer
from specbranch.service.recorder import Recorder
from specbranch.service.server import Server, ServiceOptions
from specbranch.service.timeline import Timeline

log = logging.getLogger(__name__)


def draft(
    model: Annotated[
        str, typer.Option(help="GGUF or Transformers model: a path, a name in $SPECBRANCH_MODELS, or on the hub.")
    ],
    engine: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(ENGINES)}; by default what suits the model.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda:0, gpu:1, mps: what the engine knows.")] = "cpu",
    listen: Annotated[
        str | None, typer.Option(help="ipc://PATH (default, owner only) or tcp://HOST:PORT with --keys.")
    ] = None,
    keys: Annotated[Path | None, typer.Option(help="Directory made by `specbranch keys`; needed for TCP.")] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads of the engine. Default: one per core it may use.")
    ] = None,
    cores: Annotated[str | None, typer.Option(help="Cores for this process, such as 1 or 4,5,6.")] = None,
    dtype: Annotated[
        str, typer.Option(help=f"Weights of Transformers models: {', '.join(DTYPES)}. auto: the fastest on this CPU.")
    ] = "auto",
    max_sessions: Annotated[int, typer.Option(help="Sessions remembered.", min=1)] = 256,
    cache_tokens: Annotated[int, typer.Option(help="Tokens in the engine's cache.", min=64)] = 16384,
    max_handles: Annotated[int, typer.Option(help="Branches in the engine's cache.", min=1)] = 256,
    row_limit: Annotated[int, typer.Option(help="Rows in one draft step.", min=1)] = 64,
    metrics_port: Annotated[
        int | None, typer.Option(help="Answer Prometheus scrapes at this port of localhost.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Record what both sides did and write it here at the end, for Perfetto.")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Write every verdict and the draft's distributions here, for replay and training."),
    ] = None,
    until_eof: Annotated[bool, typer.Option("--until-eof", help="Stop as well when standard input closes.")] = False,
    log_format: Annotated[str, typer.Option(help="text or json")] = "text",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error")] = "info",
) -> None:
    """Serve drafts until SIGTERM or Ctrl-C. A target's proposer connects to it; it may die at any moment."""
    with friendly_errors(EngineError, EndpointError, UsageError, ImportError, OSError):
        if log_format not in ("text", "json"):
            raise UsageError(f"--log-format is {log_format!r}; choose text or json")
        set_up_logs("json" if log_format == "json" else "text", log_level)
        for name, path in (("--trace", trace), ("--record", record)):
            if path is not None and not path.absolute().parent.is_dir():
                raise UsageError(f"{name} is {path}; there is no directory {path.parent}")
        if cores is not None:
            stay_on(cores)
        options = EngineOptions(
            model,
            device=device,
            threads=threads,
            dtype=dtype,
            max_tokens=cache_tokens,
            max_handles=max_handles,
            row_limit=row_limit,
        )
        service = ServiceOptions(listen or default_address(), service_keys(keys), max_sessions)
        timeline = Timeline() if trace else None
        draft_engine = open_engine(engine or engine_for(model), options)
        recorder = Recorder(record, Path(model).name) if record else None
        server = Server(draft_engine, service, Observer(timeline, recorder))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.stop())
        if until_eof:
            threading.Thread(target=_stop_at_eof, args=(server,), name="eof", daemon=True).start()
        scrapes = serve_metrics(server, metrics_port) if metrics_port else None
        try:
            server.serve()
        finally:
            if scrapes is not None:
                scrapes.shutdown()
            if timeline is not None and trace is not None:
                timeline.write(trace, draft=model, device=device)
                log.info("wrote %d events to %s", len(timeline), trace)


def _stop_at_eof(server: Server) -> None:
    """A parent that dies closes the pipe, however it dies."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    server.stop()


def keys(directory: Annotated[Path, typer.Argument(help="Where to write the keys.")]) -> None:
    """Make CURVE keys for a service and a client. Copy client.key_secret and service.key to the target's machine."""
    with friendly_errors(OSError):
        files = make_keys(directory)
    console_for(False).print(*(str(path) for path in files), sep="\n", highlight=False, soft_wrap=True)


def service_keys(directory: Path | None) -> ServiceKeys | None:
    """The service's part of a directory of keys."""
    return ServiceKeys(directory / "service.key_secret", directory / "clients") if directory else None
