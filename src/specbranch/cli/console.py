"""What every command shares: where people's output goes, machines' output, and errors that say how to fix them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class UsageError(ValueError):
    """Options that are wrong or do not go together."""


def console_for(as_json: bool) -> Console:
    """Standard output for people; standard error once `--json` has taken standard output."""
    return Console(stderr=as_json)


def print_json(document: dict[str, Any]) -> None:
    """One JSON document as the last line of standard output."""
    typer.echo(json.dumps(document, allow_nan=False))


def progress_bar() -> Progress:
    """A bar on standard error that leaves nothing behind."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


@contextmanager
def friendly_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Turn the exceptions a caller can fix into one line and exit code 2."""
    try:
        yield
    except kinds as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
