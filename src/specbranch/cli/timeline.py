"""`specbranch timeline`: where the time of a real run went, from the trace that the draft service wrote."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from specbranch.bench.profile_plot import PlotError, check_plot
from specbranch.bench.timeline_file import Shares, Timeline, TimelineError, read_timeline, shares
from specbranch.bench.timeline_plot import choose_stretches, plot_timeline
from specbranch.cli.console import UsageError, console_for, friendly_errors, print_json


def timeline(
    file: Annotated[Path, typer.Argument(help="A file written by `specbranch draft --trace`.")],
    plot: Annotated[Path | None, typer.Option(help="Draw a stretch of it to this file.")] = None,
    start: Annotated[float | None, typer.Option("--from", help="Begin of the stretch, in seconds.", min=0)] = None,
    end: Annotated[float | None, typer.Option("--to", help="End of the stretch, in seconds.", min=0)] = None,
    rounds: Annotated[int, typer.Option(help="Rounds to draw where no stretch is given.", min=1)] = 16,
    title: Annotated[str | None, typer.Option(help="Of the picture. Default: the file's name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document as the last line of stdout.")] = False,
) -> None:
    """Tell from a trace how long the target worked and waited, how busy the draft was, and how often it hit."""
    with friendly_errors(UsageError, TimelineError, PlotError, ImportError, OSError):
        if plot:
            check_plot(plot)
        stretch = _stretch(start, end)
        timeline = read_timeline(file).between(*stretch)
        figures = [shares(timeline, lane) for lane in timeline.targets]
        console = console_for(as_json)
        print_shares(console, timeline, figures)
        if plot:
            is_whole = start is None and end is None
            stretches = choose_stretches(timeline, rounds) if is_whole else _equal(timeline, stretch)
            plot_timeline(plot, timeline, stretches, title or file.name)
            console.print(f"drawn to {plot}", highlight=False)
        if as_json:
            print_json({"file": str(file), "is_cut": timeline.is_cut, "targets": [one.as_json() for one in figures]})


def _stretch(start: float | None, end: float | None) -> tuple[float, float]:
    stretch = (start or 0.0, math.inf if end is None else end)
    if stretch[0] >= stretch[1]:
        raise UsageError(f"--from {stretch[0]:g} is not before --to {stretch[1]:g}")
    return stretch


def _equal(timeline: Timeline, stretch: tuple[float, float]) -> list[tuple[float, float]]:
    """The same stretch for every target, ending where the last of them ends."""
    last_s = max(span.end_s for lane in timeline.targets for span in lane.steps + lane.waits)
    return [(stretch[0], min(stretch[1], last_s))] * len(timeline.targets)


def print_shares(console: Console, timeline: Timeline, figures: list[Shares]) -> None:
    """The figures of a timeline as a table."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("target", no_wrap=True)
    for column in ("seconds", "busy", "waits", "draft\nbusy", "rounds", "hit\nrate", "emitted\n/round", "rows\n/step"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in figures:
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
        console.print("The run was longer than a trace can hold; this is its beginning.")
