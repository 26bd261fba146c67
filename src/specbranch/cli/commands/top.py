"""`specbranch top`: a live view of a draft service, or of a vLLM server with drafts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from specbranch.cli.console import STATE_STYLES, CtrlCGuard, console_for, friendly_errors, print_json
from specbranch.cli.diagnosis import DraftingFinding, diagnose
from specbranch.cli.options import ServiceKeysDir
from specbranch.cli.readings import (
    GateSpeeds,
    Measure,
    ServiceUnavailable,
    StatsReading,
    StatsSource,
    count,
    exit_if_unavailable,
    open_source,
    top_rows,
)
from specbranch.errors import SpecBranchError
from specbranch.service.wire.addresses import default_address

_NAP_S = 0.1  # how often to check for Ctrl-C
_UNKNOWN = "-"
_IN_A_LINE = ("verdicts", "hit_rate", "tokens_per_round", "draft_step_ms", "wait_ms")


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
    """Show live whether drafts help, and measures of drafting: acceptance, speed, discarded tokens, waits.

    Each measure is shown over the last interval and since the start; "Does it help?" is answered since the start.
    Without a terminal one line is printed for each interval.
    If the service ends, the command keeps trying to read it; stop with Ctrl-C.
    """
    address = address or default_address()
    with friendly_errors(SpecBranchError, OSError), contextlib.closing(open_source(address, keys)) as source:
        if once:
            _print_once(source, address, as_json)
        else:
            _watch(_View(source, address, as_json), interval)


def _print_once(source: StatsSource, address: str, as_json: bool) -> None:
    with exit_if_unavailable(address, as_json):
        reading = source.read()
    if as_json:
        print_json({"address": address, "answers": True, **view_as_json(reading, None)})
    else:
        console_for(False).print(view_as_screen(source.name, reading, None))


def _watch(shown: _View, interval_s: float) -> None:
    with contextlib.suppress(KeyboardInterrupt), CtrlCGuard() as interrupt, shown:
        while not interrupt.is_asked:
            end_s = time.monotonic() + interval_s
            shown.go_on()
            while not interrupt.is_asked and (left_s := end_s - time.monotonic()) > 0:
                time.sleep(min(left_s, _NAP_S))


class _View:
    """A context manager that shows one reading after another: on a terminal as a screen, elsewhere as lines."""

    def __init__(self, source: StatsSource, address: str, as_json: bool) -> None:
        self._source = source
        self._address = address
        self._as_json = as_json
        self._console = console_for(False)
        self._live = Live(console=self._console, auto_refresh=False)
        self._has_screen = self._console.is_terminal and not self._console.is_dumb_terminal and not as_json
        self._now: StatsReading | None = None
        self._earlier: StatsReading | None = None

    def go_on(self) -> None:
        """Read the source and show the reading, or why the source cannot be read."""
        outage = ""
        try:
            now = self._source.read()
            self._earlier = self._now if self._now is not None and now.follows(self._now) else None
            self._now = now
        except ServiceUnavailable as error:
            outage = f"{error}; trying again"
        if self._has_screen:
            screen = view_as_screen(self._source.name, self._now, self._earlier, outage)
            self._live.update(screen, refresh=True)
        elif self._as_json:
            print_json({"address": self._address, "answers": not outage, **self._document(outage)})
        else:
            line = outage or (view_as_line(self._now, self._earlier) if self._now else "")
            self._console.print(f"{time.strftime('%X')} {line}", markup=False, highlight=False, soft_wrap=True)

    def _document(self, outage: str) -> dict[str, Any]:
        if outage or self._now is None:
            return {"cause": outage}
        return view_as_json(self._now, self._earlier)

    def __enter__(self) -> _View:
        if self._has_screen:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()


def view_as_screen(
    name: str, now: StatsReading | None, earlier: StatsReading | None, outage: str = ""
) -> RenderableType:
    """Return the screen for a reading: lines of current values, a table of measures, and whether drafts help.

    With `outage`, the reason why the source cannot be read, the values are those of the last reading (None: none yet).
    """
    parts: list[RenderableType] = [Text(f"specbranch: {name}", style="bold", overflow="ellipsis", no_wrap=True)]
    if outage:
        parts.append(Text(outage, style="bold red"))
    if now is not None:
        parts += [Text(line, style="dim" if outage else "") for line in now_lines(now)]
        parts.append(_table(now, earlier, is_old=bool(outage)))
        if not outage:
            parts += ["", findings_table(diagnose(now))]
    return Group(*parts)


def view_as_line(now: StatsReading, earlier: StatsReading | None) -> str:
    """Return the main measures as one line: since the earlier reading, or without one since the start."""
    words = [count(now.sessions, "session"), *now.states]
    for measure in top_rows(now, earlier):
        if measure.name in _IN_A_LINE:
            value = _value(measure, measure.last, is_rate=True) if earlier else _value(measure, measure.total)
            words.append(f"{measure.label} {value}")
    return ", ".join(words)


def view_as_json(now: StatsReading, earlier: StatsReading | None) -> dict[str, Any]:
    """Return a reading as a JSON dict: current values, sums since the start, and rates over the last interval.

    The rates are None without an earlier reading.
    """
    lines = top_rows(now, earlier)
    return {
        "model": now.model,
        "now": {
            "sessions": now.sessions,
            "active_sessions": now.active_sessions,
            "waiting_rows": now.waiting_rows,
            "is_draining": now.is_draining,
            "session_tokens": now.session_tokens,
            "targets": now.targets,
            "first_row_ms": _ms(now.first_row_s),
            "more_row_ms": _ms(now.more_row_s),
            "memory_bytes": now.memory_bytes,
            "uptime_s": now.uptime_s,
            "states": list(now.states),
            "gate": dict(now.gate),
            "gate_tokens_per_s": {rows: {"drafts": one.drafts, "plain": one.plain} for rows, one in now.speeds.items()},
        },
        "total": {line.name: line.total for line in lines} | {"undrafted": now.undrafted, "faults": now.faults},
        "last": {line.name: line.last for line in lines} if earlier is not None else None,
        "interval_s": now.at_s - earlier.at_s if earlier is not None else None,
        "findings": [one.as_json() for one in diagnose(now)],
    }


def now_lines(now: StatsReading) -> list[str]:
    """Return the current values of a reading as lines of text."""
    about = [now.model, *(f"drafting: {state}" for state in now.states)]
    if now.uptime_s is not None:
        about.append(f"up {duration(now.uptime_s)}")
    if now.is_draining:
        about.append("draining")
    held = [count(now.sessions, "session")]
    if now.targets is not None:
        held[0] += f" of {count(now.targets, 'target')}"
    if now.active_sessions is not None:
        held.append(f"{now.active_sessions:,} in use")
    if now.session_tokens is not None:
        held.append(count(now.session_tokens, "token"))
    if now.memory_bytes is not None:
        held.append(f"memory {memory(now.memory_bytes)}")
    if now.undrafted:
        held.append(f"{count(now.undrafted, 'request')} not drafted for")
    if now.faults:
        held.append(count(now.faults, "fault"))
    lines = [", ".join(word for word in about if word), ", ".join(held), _cost(now), *_gate(now)]
    return [line for line in lines if line]


def duration(seconds: float) -> str:
    """Return a duration as text in its two largest units, such as 2 h 5 min."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def memory(size: float | None) -> str:
    """Return a size in bytes as text in MB or GB; "" if it is unknown."""
    if size is None:
        return ""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def _cost(now: StatsReading) -> str:
    if now.draft_steps is not None or not now.first_row_s:
        return ""
    return f"a draft step of one row takes {_ms(now.first_row_s):.1f} ms, each further row {_ms(now.more_row_s):.1f} ms"


def _gate(now: StatsReading) -> list[str]:
    lines = [_gate_line(rows, is_open, now.speeds.get(rows)) for rows, is_open in now.gate.items()]
    return ["tokens/s by requests in a step:", *lines] if lines else []


def _gate_line(rows: str, is_open: bool, speeds: GateSpeeds | None) -> str:
    words = f"{speeds.drafts:,.1f} with drafts, {speeds.plain:,.1f} without: " if speeds else ""
    return f"  {rows:>7}  {words}drafting is {'on' if is_open else 'off'}"


def _table(now: StatsReading, earlier: StatsReading | None, is_old: bool) -> Table:
    table = Table(box=None, padding=(0, 2), pad_edge=False, header_style="bold cyan", style="dim" if is_old else "")
    table.add_column("", no_wrap=True, min_width=24)
    if earlier is not None:
        table.add_column(f"last {now.at_s - earlier.at_s:.1f} s", justify="right", min_width=12)
    table.add_column("since start", justify="right", min_width=14)
    for measure in top_rows(now, earlier):
        cells = [measure.label]
        if earlier is not None:
            cells.append(_value(measure, measure.last, is_rate=True))
        table.add_row(*cells, _value(measure, measure.total))
    return table


def findings_table(findings: Sequence[DraftingFinding]) -> RenderableType:
    """Return the answer to "Does it help?": each finding's state, title, figures and action."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for one in findings:
        kind = one.kind
        table.add_row(Text(f"  {kind.state.upper()}", style=STATE_STYLES[kind.state]), Text(kind.title, style="bold"))
        table.add_row("", Text(one.detail))
        table.add_row("", Text(kind.action))
    return Group(Text("Does it help?", style="bold cyan"), table)


def _value(measure: Measure, value: float | None, is_rate: bool = False) -> str:
    if value is None:
        return _UNKNOWN
    if measure.unit == "%":
        return f"{100 * value:.0f} %"
    if measure.unit:
        return f"{value:,.2f} ms" if measure.unit == "ms" else f"{value:.2f}"
    return f"{value:,.1f}/s" if is_rate else f"{value:,.0f}"


def _ms(seconds: float | None) -> float:
    return 1000.0 * (seconds or 0.0)
