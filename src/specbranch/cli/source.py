"""Where `specbranch top` reads: a draft service, by its own protocol, or a page of metrics."""

from __future__ import annotations

import contextlib
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import typer
from rich.console import Console
from rich.markup import escape

from specbranch.cli.console import print_json
from specbranch.cli.reading import Reading, of_overview, of_page, printable
from specbranch.errors import SpecBranchError, UsageError
from specbranch.launch.draft_process import why_silent
from specbranch.service.client.interface import client_keys
from specbranch.service.client.stats import Reach, Reporter, read_page
from specbranch.service.wire.messages import Overview

_ANSWER_S = 1.0
_MOST_BYTES = 1 << 24  # of a page
_HINT = (
    "start one by `specbranch draft MODEL`, or name its ADDRESS; the draft of `specbranch serve` is seen through its "
    "server, by `specbranch top http://HOST:PORT`"
)


class Outage(SpecBranchError, RuntimeError):
    """Nothing could be read now; the message says why. It may be back at any time."""


@contextlib.contextmanager
def ending_at_outage(address: str, as_json: bool) -> Iterator[None]:
    """Where nothing can be read, end with code 1: say why and what would help; for machines, as JSON too."""
    try:
        yield
    except Outage as outage:
        hint = f"; {_HINT}" if str(outage).startswith("nobody") else ""
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(outage))}{hint}", highlight=False, soft_wrap=True)
        if as_json:
            print_json({"address": address, "answers": False, "cause": str(outage)})
        raise typer.Exit(1) from outage


class Source(Protocol):
    """Somebody who counts."""

    name: str

    def read(self) -> Reading:
        """What is true now; raises `Outage`."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


def open_source(address: str, keys: Path | None) -> Source:
    """The source at an address of either kind; raises for one that cannot be right."""
    if address.startswith(("http://", "https://")):
        if keys is not None:
            raise UsageError("--keys belongs to a draft service at tcp://HOST:PORT, not to a server's metrics")
        return PageSource(address)
    return ServiceSource(address, keys)


class ServiceSource:
    """A draft service."""

    def __init__(self, address: str, keys: Path | None) -> None:
        self.name = f"draft service at {address}"
        self._address = address
        self._keys = keys
        self._reporter = Reporter(address, None, client_keys(str(keys) if keys else None))

    def read(self) -> Reading:
        return of_overview(self.overview(), time.monotonic())

    def overview(self) -> Overview:
        """What the service says of itself; raises `Outage`."""
        reach = self._reporter.ask(_ANSWER_S)
        if self._reporter.refusal is not None:
            raise UsageError(
                f"the draft service at {self._address} is of an older version, which tells nothing of itself; update it"
            )
        if reach is Reach.ABSENT:
            raise Outage(why_silent(self._address, self._keys) or f"nobody listens at {self._address}")
        overview = self._reporter.overview
        if reach is not Reach.ANSWERS or overview is None:
            raise Outage(f"the draft service at {self._address} does not answer")
        return overview

    def close(self) -> None:
        self._reporter.close()


class PageSource:
    """An endpoint of Prometheus metrics: vLLM's, or that of a draft service with --metrics-port."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/").removesuffix("/metrics")
        self.name = f"server at {self._url}"

    def read(self) -> Reading:
        reading = of_page(read_page(self._text()), time.monotonic())
        if reading is None:
            raise Outage(f"{self._url}/metrics has no metrics of specbranch: the server runs without our proposer")
        self.name = f"{'vLLM' if reading.uptime_s is None else 'draft service'} at {self._url}"
        return reading

    def _text(self) -> str:
        try:
            with urllib.request.urlopen(f"{self._url}/metrics", timeout=_ANSWER_S) as page:
                return str(page.read(_MOST_BYTES).decode(errors="replace"))
        except urllib.error.HTTPError as error:
            error.close()
            raise Outage(f"{self._url}/metrics answers with {error.code} {printable(error.reason)}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Outage(f"no answer from {self._url}: {printable(getattr(error, 'reason', error))}") from error

    def close(self) -> None:
        pass
