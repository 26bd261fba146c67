"""`specbranch ping`, `describe` and `drain`: query a draft service, and take it out of service."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from specbranch.cli.commands.top import duration, memory
from specbranch.cli.console import console_for, friendly_errors, print_json
from specbranch.cli.options import AsJson, ServiceAddress, ServiceKeysDir
from specbranch.cli.readings import ServiceSource, ServiceUnavailable, count, exit_if_unavailable, printable
from specbranch.errors import SpecBranchError, UsageError
from specbranch.launch.draft_process import explain_no_reply
from specbranch.service.client.client import DraftClient
from specbranch.service.client.interface import ClientOptions, client_keys
from specbranch.service.client.transport import MessageChannel, ZmqTransport
from specbranch.service.wire.addresses import AddressError, default_address
from specbranch.service.wire.messages import Drain, Draining, ErrorReply, Overview

_ANSWER_S = 2.0
_TIMES = 5
_PAUSE_S = 0.5


def ping(address: ServiceAddress = None, keys: ServiceKeysDir = None, as_json: AsJson = False) -> None:
    """Connect to a draft service as a target would, and print its model, version and round-trip time.

    Exit code 0: it answers; 1: it does not.
    """
    address = address or default_address()
    with friendly_errors(AddressError, OSError), exit_if_unavailable(address, as_json):
        answer = _ask(address, keys)
    if as_json:
        print_json({"address": address, "answers": True, **answer})
        return
    words = f"{printable(answer['model'])}, version {printable(answer['version'] or 'unknown')}"
    console_for(False).print(
        f"{address} answers in {answer['round_trip_ms']:.2f} ms: {words}", highlight=False, markup=False, soft_wrap=True
    )


def _ask(address: str, keys: Path | None) -> dict[str, Any]:
    options = ClientOptions(address, keys=client_keys(str(keys) if keys else None))
    trips_s: list[float] = []
    with contextlib.closing(DraftClient(options)) as client:
        welcome = client.hello(_ANSWER_S)  # connects; not timed
        while welcome is not None and len(trips_s) < _TIMES:
            start_s = time.monotonic()
            welcome = client.hello(_ANSWER_S)
            trips_s.append(time.monotonic() - start_s)
    if welcome is None:
        raise ServiceUnavailable(explain_no_reply(address, keys) or f"nobody listens at {address}")
    return {
        "model": welcome.model,
        "version": _version(address, keys),
        "wire": welcome.version,
        "round_trip_ms": 1000.0 * statistics.median(trips_s),
    }


def _version(address: str, keys: Path | None) -> str | None:
    """Return the release that the service runs; None if the service does not answer or is too old to report it."""
    with (
        contextlib.suppress(ServiceUnavailable, UsageError),
        contextlib.closing(ServiceSource(address, keys)) as source,
    ):
        return str(source.overview().settings.get("version", ""))
    return None


def describe(address: ServiceAddress = None, keys: ServiceKeysDir = None, as_json: AsJson = False) -> None:
    """Show the properties of a draft service: model, engine, cache, limits, and the number of its targets.

    Exit code 1: it does not answer.
    """
    address = address or default_address()
    with (
        friendly_errors(SpecBranchError, OSError),
        contextlib.closing(ServiceSource(address, keys)) as source,
        exit_if_unavailable(address, as_json),
    ):
        overview = source.overview()
    if as_json:
        print_json({"address": address, "settings": overview.settings, "figures": overview.figures})
        return
    console = console_for(False)
    console.print(Text(f"draft service at {address}", style="bold cyan"), soft_wrap=True)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, words in describe_lines(overview).items():
        table.add_row(f"  {name}", Text(printable(words)))
    console.print(table)


def describe_lines(overview: Overview) -> dict[str, str]:
    """Return a line of text for each property that a service reports, by the property's name."""
    settings, figures = overview.settings, overview.figures
    weights = settings.get("weight_bytes")
    found = {
        "model": _joined(settings, "{model}"),
        "engine": _joined(settings, "{engine}", "device {device}", "{dtype}")
        + (f", {memory(float(weights))} of weights" if isinstance(weights, int) else ""),
        "vocabulary": _joined(settings, "{vocab_len} tokens"),
        "cache": _joined(settings, "{cache_tokens} tokens", "{max_handles} branches"),
        "limits": _joined(
            settings,
            "{max_sessions} sessions",
            "{max_session_tokens} tokens a request",
            "{row_limit} rows a step",
            "prefill in pieces of {prefill_chunk}",
        ),
        "version": _joined(settings, "{version}", "protocol {wire}"),
        "new requests": "declined: it is draining" if figures.get("draining") else "",
        "targets": f"{figures.get('targets', 0):,.0f} now, with {_usage(figures, 'session')} of "
        f"{count(round(figures.get('session_tokens', 0)), 'token')}",
        "memory": memory(figures.get("memory_bytes") or None),
        "uptime": duration(figures.get("uptime_seconds", 0.0)),
    }
    return {name: words for name, words in found.items() if words}


def _joined(settings: Mapping[str, str | int], *forms: str) -> str:
    """Fill the settings into the templates `forms`, such as "{cache_tokens} tokens", and return them joined by commas.

    A template whose setting is not reported is left out.
    """
    words = {name: f"{value:,}" if isinstance(value, int) else value for name, value in settings.items()}
    return ", ".join(form.format(**words) for form in forms if form.split("{")[1].split("}")[0] in words)


def _usage(figures: Mapping[str, float], thing: str) -> str:
    return count(round(figures.get(f"{thing}s", 0)), thing)


def drain(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="The draft service: ipc://PATH, or tcp://HOST:PORT with --keys.")
    ],
    keys: ServiceKeysDir = None,
    wait: Annotated[
        float, typer.Option(metavar="S", help="Maximum seconds to wait until no request is active.", min=0)
    ] = 0.0,
    undo: Annotated[bool, typer.Option("--undo", help="Accept new requests again.")] = False,
    as_json: AsJson = False,
) -> None:
    """Let a draft service accept no new requests, so that it can be stopped.

    Targets with several draft services move their requests to the others. A target with this one only gets drafts for
    its running requests until they end, and decodes new ones without drafts.
    Exit code 1: it does not answer, or requests are still active after --wait.
    """
    with friendly_errors(SpecBranchError, OSError), exit_if_unavailable(address, as_json):
        told = _drain(address, keys, not undo, 0.0 if undo else wait)
    if as_json:
        print_json({"address": address, "answers": True, "is_draining": told.is_on, "sessions": told.sessions})
    else:
        state = "accepts no new requests" if told.is_on else "accepts new requests"
        console_for(False).print(
            f"{address} {state}; {count(told.sessions, 'request')} active",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    if wait and told.is_on and told.sessions:
        raise typer.Exit(1)


def _drain(address: str, keys: Path | None, is_on: bool, wait_s: float) -> Draining:
    """Ask the service to drain, or with `is_on` False to stop draining, and return its last reply.

    Repeat the request until no sequence is in use or `wait_s` has passed. Raise `ServiceUnavailable` without a reply.
    """
    end_s = time.monotonic() + wait_s
    transport = ZmqTransport(address, client_keys(str(keys) if keys else None))
    with contextlib.closing(MessageChannel(transport)) as connection:
        connection.await_writable(_ANSWER_S)
        for round_number in itertools.count(1):
            told = _ask_to_drain(connection, Drain(round_number, is_on))
            if told is None:
                break
            if not told.sessions or time.monotonic() + _PAUSE_S > end_s:
                return told
            time.sleep(_PAUSE_S)
    raise ServiceUnavailable(explain_no_reply(address, keys) or f"nobody listens at {address}")


def _ask_to_drain(connection: MessageChannel, request: Drain) -> Draining | None:
    if connection.send(request):
        for reply in connection.iter_replies(time.monotonic() + _ANSWER_S):
            if isinstance(reply, ErrorReply):
                raise UsageError(
                    f"the draft service refuses: {reply.reason} (one of an older version cannot be drained)"
                )
            if isinstance(reply, Draining) and reply.round == request.round:
                return reply
    return None
