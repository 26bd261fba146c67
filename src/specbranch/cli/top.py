"""`specbranch top`: a live view of a draft service, or of a vLLM server with drafts."""

from __future__ import annotations

import contextlib
import time
from types import TracebackType
from typing import Annotated, Any

import typer
from rich.live import Live

from specbranch.cli import top_view
from specbranch.cli.console import console_for, friendly_errors, print_json
from specbranch.cli.interrupt import Interrupt
from specbranch.cli.options import ServiceKeysDir
from specbranch.cli.reading import Reading
from specbranch.cli.source import Outage, Source, ending_at_outage, open_source
from specbranch.errors import SpecBranchError
from specbranch.service.wire.addresses import default_address

_NAP_S = 0.1  # Ctrl-C is noticed so soon


def top(
    address: Annotated[
        str | None,
        typer.Argument(
            metavar="ADDRESS",
            help="A draft service, ipc://PATH or tcp://HOST:PORT with --keys; or a vLLM server with drafts, "
            "http://HOST:PORT. Default: the socket that `specbranch draft` uses by itself.",
            show_default=False,
        ),
    ] = None,
    keys: ServiceKeysDir = None,
    interval: Annotated[
        float, typer.Option(metavar="S", help="Seconds between two readings, and of each rate.", min=0.1)
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one reading and exit; code 1 if there is none.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each reading as a line of JSON, instead of the screen.")
    ] = False,
) -> None:
    """Watch live what drafting does: hits, tokens a round, rolled-back tokens, draft steps, waits.

    Each measure is shown over the last interval and since the start.
    Without a terminal one line is printed for each interval.
    A service that ends is waited for; stop with Ctrl-C.
    """
    address = address or default_address()
    with friendly_errors(SpecBranchError, OSError), contextlib.closing(open_source(address, keys)) as source:
        if once:
            _print_once(source, address, as_json)
        else:
            _watch(_View(source, address, as_json), interval)


def _print_once(source: Source, address: str, as_json: bool) -> None:
    with ending_at_outage(address, as_json):
        reading = source.read()
    if as_json:
        print_json({"address": address, "answers": True, **top_view.as_json(reading, None)})
    else:
        console_for(False).print(top_view.as_screen(source.name, reading, None))


def _watch(shown: _View, interval_s: float) -> None:
    with contextlib.suppress(KeyboardInterrupt), Interrupt() as interrupt, shown:
        while not interrupt.is_asked:
            end_s = time.monotonic() + interval_s
            shown.go_on()
            while not interrupt.is_asked and (left_s := end_s - time.monotonic()) > 0:
                time.sleep(min(left_s, _NAP_S))


class _View:
    """Readings one after the other: on a terminal as a screen, elsewhere as lines. A context manager."""

    def __init__(self, source: Source, address: str, as_json: bool) -> None:
        self._source = source
        self._address = address
        self._as_json = as_json
        self._console = console_for(False)
        self._live = Live(console=self._console, auto_refresh=False)
        self._has_screen = self._console.is_terminal and not self._console.is_dumb_terminal and not as_json
        self._now: Reading | None = None
        self._earlier: Reading | None = None

    def go_on(self) -> None:
        """Show the next reading, or that there is none."""
        outage = ""
        try:
            now = self._source.read()
            self._earlier = self._now if self._now is not None and now.follows(self._now) else None
            self._now = now
        except Outage as error:
            outage = f"{error}; trying again"
        if self._has_screen:
            screen = top_view.as_screen(self._source.name, self._now, self._earlier, outage)
            self._live.update(screen, refresh=True)
        elif self._as_json:
            print_json({"address": self._address, "answers": not outage, **self._document(outage)})
        else:
            line = outage or (top_view.as_line(self._now, self._earlier) if self._now else "")
            self._console.print(f"{time.strftime('%X')} {line}", markup=False, highlight=False, soft_wrap=True)

    def _document(self, outage: str) -> dict[str, Any]:
        if outage or self._now is None:
            return {"cause": outage}
        return top_view.as_json(self._now, self._earlier)

    def __enter__(self) -> _View:
        if self._has_screen:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
