"""`specbranch draft`: run the draft service as a process; `specbranch keys`: create the keys that it needs for TCP."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, Literal

import typer

from specbranch.cli.console import console_for, friendly_errors
from specbranch.cli.options import (
    Cores,
    Device,
    Engine,
    Model,
    ModelDtype,
    RecordFile,
    Threads,
    TimelineFile,
    check_directory,
)
from specbranch.engines.base import EngineOptions
from specbranch.engines.registry import engine_for, open_engine
from specbranch.errors import EngineError, UsageError
from specbranch.launch.placement import pin_process
from specbranch.logs import set_up_logs
from specbranch.service.server.prometheus import serve_metrics
from specbranch.service.server.recorder import EventSink, TraceRecorder
from specbranch.service.server.server import Server, ServiceOptions
from specbranch.service.server.timeline_recorder import TimelineRecorder
from specbranch.service.wire.addresses import AddressError, ServiceKeys, default_address, make_keys

log = logging.getLogger(__name__)


def draft(
    model: Model,
    engine: Engine = None,
    device: Device = "cpu",
    dtype: ModelDtype = "auto",
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="ipc://PATH, a socket for this user only, or tcp://HOST:PORT together with --keys. Default: a socket "
            "in this user's run directory.",
        ),
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory written by `specbranch keys`; required for TCP.")
    ] = None,
    threads: Threads = None,
    cores: Cores = None,
    max_sessions: Annotated[int, typer.Option(metavar="N", help="Maximum requests kept in memory.", min=1)] = 256,
    cache_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Size of the KV cache in tokens, for all requests together. Default: by the memory that is free.",
            min=128,
        ),
    ] = None,
    max_handles: Annotated[int, typer.Option(metavar="N", help="Maximum branches in the KV cache.", min=1)] = 256,
    row_limit: Annotated[int, typer.Option(metavar="N", help="Maximum batch size of a draft step.", min=1)] = 64,
    max_wait: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="Maximum time to hold a response, whatever deadline the client sends.", min=0.0
        ),
    ] = 1.0,
    metrics_port: Annotated[
        int | None, typer.Option(metavar="PORT", help="Port for Prometheus metrics. Default: none.")
    ] = None,
    metrics_host: Annotated[
        str, typer.Option(metavar="HOST", help="Address that the metrics port listens on; 0.0.0.0 is all of them.")
    ] = "127.0.0.1",
    timeline: TimelineFile = None,
    record: RecordFile = None,
    until_eof: Annotated[
        bool,
        typer.Option(
            "--until-eof",
            help="Also stop when standard input is closed, and print loading progress to stdout.",
        ),
    ] = False,
    log_format: Annotated[Literal["text", "json"], typer.Option(help="Format of the log lines.")] = "text",
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option(metavar="LEVEL", help="Least severe messages to log: debug, info, warning or error."),
    ] = "info",
) -> None:
    """Run the draft service alone, for targets that are started separately.

    `serve` and `generate` start a draft service of their own.
    Stop it with Ctrl-C or SIGTERM; targets keep running without it.
    """
    with friendly_errors(EngineError, AddressError, UsageError, ImportError, OSError):
        set_up_logs(log_format, log_level)
        for name, path in (("--timeline", timeline), ("--record", record)):
            check_directory(name, path)
        if cores is not None:
            pin_process(cores)
        options = EngineOptions(
            model=model,
            device=device,
            threads=threads,
            dtype=dtype,
            max_tokens=cache_tokens,
            max_handles=max_handles,
            row_limit=row_limit,
            on_progress=_tell_parent if until_eof else _tell_log,
        )
        name = engine or engine_for(model)
        service = ServiceOptions(
            listen or default_address(),
            service_keys(keys),
            max_sessions,
            engine=name,
            max_wait_s=max_wait,
        )
        timeline_recorder = TimelineRecorder() if timeline else None
        options.on_progress(f"importing the libraries of the {name} engine")
        draft_engine = open_engine(name, options)
        recorder = TraceRecorder(record, Path(model).name) if record else None
        observer = EventSink(timeline_recorder, recorder) if timeline or record else None
        server = Server(draft_engine, service, observer)
        options.on_progress("timing draft steps")
        server.runner.measure()
        try:
            if keys is not None and not sys.stdin.isatty():  # at a terminal this signal says that it was closed
                reload_keys_on_hangup(server)
            _serve(server, (metrics_host, metrics_port) if metrics_port else None, until_eof)
        finally:
            if timeline_recorder is not None and timeline is not None:
                timeline_recorder.write(timeline, draft=model, device=device)
                log.info("wrote %d events to %s", len(timeline_recorder), timeline)


def _tell_parent(stage: str) -> None:
    """Print a stage of loading on standard output, where the parent process reads it."""
    with contextlib.suppress(OSError):  # the parent may have closed the pipe
        print(stage, flush=True)  # noqa: T201


def _tell_log(stage: str) -> None:
    log.info("%s", stage)


def _serve(server: Server, metrics_at: tuple[str, int] | None, until_eof: bool) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    if until_eof:
        threading.Thread(target=_stop_at_eof, args=(server,), name="eof", daemon=True).start()
    metrics = serve_metrics(server.handler.metrics, *metrics_at) if metrics_at else None
    try:
        server.serve()
    finally:
        if metrics is not None:
            metrics.shutdown()


def reload_keys_on_hangup(server: Server) -> None:
    """Let the server read its clients' keys again when this process gets the signal SIGHUP."""
    signal.signal(signal.SIGHUP, lambda *_: server.reload_keys())


def _stop_at_eof(server: Server) -> None:
    """Stop the server when standard input closes, as it does when the parent dies for any reason."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    server.stop()


def keys(directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory for the key files.")]) -> None:
    """Create the keys that a draft service on another machine needs.

    The draft's machine keeps DIR; give it to `specbranch draft` with --keys.
    The target's machine gets client.key_secret and service.key.
    Files that end in _secret must stay private.
    Existing keys are never overwritten.
    """
    with friendly_errors(AddressError, OSError):
        files = make_keys(directory)
    console = console_for(False)
    for path in files:
        where = "copy to the target's machine" if path.name in ("client.key_secret", "service.key") else "keep here"
        console.print(f"{path}: {where}", highlight=False, soft_wrap=True, markup=False)


def service_keys(directory: Path | None) -> ServiceKeys | None:
    """Return the paths of the service's key files in a directory; None without a directory."""
    return ServiceKeys(directory / "service.key_secret", directory / "clients") if directory else None
