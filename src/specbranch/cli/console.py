"""What every command shares: where output goes, and error messages that say how to fix the problem."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text


def console_for(as_json: bool) -> Console:
    """Standard output for people; standard error if `--json` takes standard output."""
    return Console(stderr=as_json)


def warn(line: str | None) -> None:
    """Print a warning on standard error, if there is one."""
    if line:
        Console(stderr=True).print(f"[bold]specbranch:[/] warning: {escape(line)}", highlight=False, soft_wrap=True)


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON document as the last line of standard output."""
    typer.echo(json.dumps(document, allow_nan=False))


def progress_bar(console: Console, takes_output: bool) -> Progress:
    """A line that disappears at the end: stage, bar and count where there is a total, time.

    With `takes_output`, what Python code prints meanwhile appears above it.
    """
    columns = (SpinnerColumn(), TextColumn("{task.description}"), _Bar(), _Count(), TimeElapsedColumn())
    return Progress(
        *columns, console=console, transient=True, redirect_stdout=takes_output, redirect_stderr=takes_output
    )


class _Bar(BarColumn):
    """A bar, where it is known how much there is to do."""

    def render(self, task: Task) -> Any:
        return super().render(task) if task.total else Text("")


class _Count(MofNCompleteColumn):
    """How much is done, where it is known how much there is to do."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.total else Text("")


def print_help_alone(context: typer.Context) -> None:
    """For a command without a subcommand: print its help and exit with code 0."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


@contextmanager
def friendly_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Turn exceptions that the user can fix into one line and exit code 2."""
    try:
        yield
    except kinds as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
