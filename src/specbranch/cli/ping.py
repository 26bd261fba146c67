"""`specbranch ping`: is the draft service there, and how far away?"""

from __future__ import annotations

import contextlib
import statistics
import time
from pathlib import Path
from typing import Any

from specbranch.cli.console import console_for, friendly_errors, print_json
from specbranch.cli.options import AsJson, ServiceAddress, ServiceKeysDir
from specbranch.cli.reading import printable
from specbranch.cli.source import Outage, ServiceSource, ending_at_outage
from specbranch.errors import UsageError
from specbranch.launch.draft_process import why_silent
from specbranch.service.client.client import DraftClient
from specbranch.service.client.interface import ClientOptions, client_keys
from specbranch.service.wire.addresses import EndpointError, default_address

_ANSWER_S = 2.0
_TIMES = 5


def ping(address: ServiceAddress = None, keys: ServiceKeysDir = None, as_json: AsJson = False) -> None:
    """Ask a draft service whether it would draft for a target here.

    Exit code 0: it answers; 1: it does not.
    """
    address = address or default_address()
    with friendly_errors(EndpointError, OSError), ending_at_outage(address, as_json):
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
        welcome = client.hello(_ANSWER_S)  # this one connects
        while welcome is not None and len(trips_s) < _TIMES:
            start_s = time.monotonic()
            welcome = client.hello(_ANSWER_S)
            trips_s.append(time.monotonic() - start_s)
    if welcome is None:
        raise Outage(why_silent(address, keys) or f"nobody listens at {address}")
    return {
        "model": welcome.model,
        "version": _version(address, keys),
        "wire": welcome.version,
        "round_trip_ms": 1000.0 * statistics.median(trips_s),
    }


def _version(address: str, keys: Path | None) -> str | None:
    """The release that the service runs; None if it is too old to tell."""
    with contextlib.suppress(Outage, UsageError), contextlib.closing(ServiceSource(address, keys)) as source:
        return str(source.overview().settings.get("version", ""))
    return None
