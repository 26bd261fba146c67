"""`specbranch describe`: what a draft service runs, within which limits, and for how many."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from specbranch.cli.console import console_for, friendly_errors, print_json
from specbranch.cli.options import AsJson, ServiceAddress, ServiceKeysDir
from specbranch.cli.reading import printable
from specbranch.cli.source import ServiceSource, ending_at_outage
from specbranch.cli.top_view import count, duration, memory
from specbranch.errors import SpecBranchError
from specbranch.service.wire.addresses import default_address
from specbranch.service.wire.messages import Overview


def describe(address: ServiceAddress = None, keys: ServiceKeysDir = None, as_json: AsJson = False) -> None:
    """Show what a draft service runs: model, engine, cache, limits, and how many targets it serves.

    Exit code 1: it does not answer.
    """
    address = address or default_address()
    with (
        friendly_errors(SpecBranchError, OSError),
        contextlib.closing(ServiceSource(address, keys)) as source,
        ending_at_outage(address, as_json),
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
    for name, words in lines(overview).items():
        table.add_row(f"  {name}", Text(printable(words)))
    console.print(table)


def lines(overview: Overview) -> dict[str, str]:
    """One line for each thing; what the service does not tell is left out."""
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
            "{max_session_tokens} tokens of text",
            "{row_limit} rows a step",
            "prefill in pieces of {piece_len}",
        ),
        "version": _joined(settings, "{version}", "protocol {wire}"),
        "new texts": "declined: it is draining" if figures.get("draining") else "",
        "targets": f"{figures.get('targets', 0):,.0f} now, with {_held(figures, 'session')} of "
        f"{count(round(figures.get('session_tokens', 0)), 'token')}",
        "memory": memory(figures.get("memory_bytes") or None),
        "uptime": duration(figures.get("uptime_seconds", 0.0)),
    }
    return {name: words for name, words in found.items() if words}


def _joined(settings: Mapping[str, str | int], *forms: str) -> str:
    """The forms whose setting is known, filled in."""
    words = {name: f"{value:,}" if isinstance(value, int) else value for name, value in settings.items()}
    return ", ".join(form.format(**words) for form in forms if form.split("{")[1].split("}")[0] in words)


def _held(figures: Mapping[str, float], thing: str) -> str:
    return count(round(figures.get(f"{thing}s", 0)), thing)
