"""`specbranch timeline`: show how targets and draft spent a run, from the file that the draft service wrote."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from specbranch.bench.figures import choose_stretches, plot_timeline
from specbranch.bench.profile import PlotError, check_plot
from specbranch.bench.timeline import Shares, Timeline, TimelineError, read_timeline, time_shares, write_replay
from specbranch.cli.console import console_for, friendly_errors, print_json
from specbranch.cli.options import AsJson
from specbranch.engines.vocabulary import token_text
from specbranch.errors import UsageError


def timeline(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="File written by `serve`, `generate` or `draft` with --timeline.", show_default=False
        ),
    ],
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw a part of it to this file: .png, .svg or .pdf.")
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page that plays it in a browser, with the draft trees: .html."),
    ] = None,
    start: Annotated[
        float | None, typer.Option("--from", metavar="S", help="Start of the part, in seconds.", min=0)
    ] = None,
    end: Annotated[float | None, typer.Option("--to", metavar="S", help="End of the part, in seconds.", min=0)] = None,
    rounds: Annotated[
        int, typer.Option(metavar="N", help="Rounds to draw if neither --from nor --to is given.", min=1)
    ] = 16,
    title: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Title of figure and page. Default: the file's name.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how the targets and the draft of a run spent their time.

    For each target: how long it computed and waited, how busy the draft was,
    and how often a branch was ready (hit rate).
    `--replay run.html` shows each verification result with the draft tree at that moment.
    Perfetto (ui.perfetto.dev) and chrome://tracing open the same file.
    """
    with friendly_errors(UsageError, TimelineError, PlotError, ImportError, OSError):
        if plot:
            check_plot(plot)
        if replay and replay.suffix != ".html":
            raise UsageError(f"--replay {replay}: the page is HTML; give a name that ends in .html")
        stretch = _stretch(start, end)
        read = read_timeline(file).between(*stretch)
        found = [time_shares(read, lane) for lane in read.targets]
        console = console_for(as_json)
        print_shares(console, read, found)
        if plot:
            is_whole = start is None and end is None
            stretches = choose_stretches(read, rounds) if is_whole else _equal(read, stretch)
            plot_timeline(plot, read, stretches, title or file.name)
            console.print(f"drew {plot}", highlight=False)
        if replay:
            write_replay(replay, read, title or file.name, token_text(read.draft))
            console.print(f"wrote {replay}; open it in a browser", highlight=False)
        if as_json:
            print_json({"file": str(file), "is_cut": read.is_cut, "targets": [one.as_json() for one in found]})


def _stretch(start: float | None, end: float | None) -> tuple[float, float]:
    stretch = (start or 0.0, math.inf if end is None else end)
    if stretch[0] >= stretch[1]:
        raise UsageError(f"--from {stretch[0]:g} is not before --to {stretch[1]:g}")
    return stretch


def _equal(timeline: Timeline, stretch: tuple[float, float]) -> list[tuple[float, float]]:
    """Return the time range `stretch` once for each target, cut off at the end of the last event of any target."""
    last_s = max(span.end_s for lane in timeline.targets for span in lane.steps + lane.waits)
    return [(stretch[0], min(stretch[1], last_s))] * len(timeline.targets)


def print_shares(console: Console, timeline: Timeline, found: list[Shares]) -> None:
    """Print how each target and its draft spent their time, as a table."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("target", no_wrap=True)
    for column in ("seconds", "busy", "waits", "draft\nbusy", "rounds", "hit\nrate", "tokens\n/round", "rows\n/step"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in found:
        table.add_row(
            one.target,
            f"{one.time_s:.2f}",
            f"{one.busy:.0%}",
            f"{one.waiting:.1%}",
            f"{one.draft_busy:.0%}",
            str(one.rounds),
            f"{one.hit_rate:.2f}",
            f"{one.emitted_per_round:.2f}",
            f"{one.rows_per_draft_step:.1f}",
        )
    console.print(table)
    if timeline.is_cut:
        console.print("The run had more events than a timeline holds; this is its beginning.")
