"""The console of every command: output, errors, progress, redirected output of libraries, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

State = Literal["ok", "fail", "skip"]
STATE_STYLES: Mapping[State, str] = {"ok": "green", "fail": "bold red", "skip": "yellow"}

_LINES = 10  # the most lines that a stage's progress takes without a terminal
_AGAIN_S = 15.0  # after this time a stage that still runs is printed again


def console_for(as_json: bool) -> Console:
    """Return the console for text that people read: standard output or, with `as_json`, standard error."""
    return Console(stderr=as_json)


def warn(line: str | None) -> None:
    """Print a warning on standard error; do nothing if `line` is None or empty."""
    if line:
        Console(stderr=True).print(f"[bold]specbranch:[/] warning: {escape(line)}", highlight=False, soft_wrap=True)


def print_json(document: dict[str, Any]) -> None:
    """Print a JSON dict as one line on standard output; raise `ValueError` if it has a number that is not finite."""
    typer.echo(json.dumps(document, allow_nan=False))


def progress_bar(console: Console, takes_output: bool) -> Progress:
    """Return a progress line that disappears at the end: stage, elapsed time and, if a total is known, bar and count.

    With `takes_output`, what Python code prints to standard output and error appears above the line.
    """
    columns = (SpinnerColumn(), TextColumn("{task.description}"), _Bar(), _Count(), TimeElapsedColumn())
    return Progress(
        *columns, console=console, transient=True, redirect_stdout=takes_output, redirect_stderr=takes_output
    )


class _Bar(BarColumn):
    """A progress column with a bar; blank if the total is unknown."""

    def render(self, task: Task) -> Any:
        return super().render(task) if task.total else Text("")


class _Count(MofNCompleteColumn):
    """A progress column with the count, done/total; blank if the total is unknown."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.total else Text("")


def print_help_alone(context: typer.Context) -> None:
    """Print the help and exit with code 0 if the command was called without a subcommand."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


@contextmanager
def friendly_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Turn the given exceptions, which the user can fix, into one line on standard error and exit code 2."""
    try:
        yield
    except kinds as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error


class ProgressBar:
    """A context manager that shows the progress of a command. `console` None means standard error.

    Without a terminal, print a line when a stage starts, after each tenth of it, and after 15 seconds without a line.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        # If the caller gives a console, Python's output goes elsewhere and must not be redirected to it.
        self._bar = progress_bar(self._console, takes_output=console is None) if self._console.is_terminal else None
        self._task = self._bar.add_task("", total=None) if self._bar else None
        self._stage = ""
        self._tenths = 0
        self._begin_s = self._said_s = time.monotonic()
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="progress", daemon=True)

    def show(self, stage: str, done: int | None = None, total: int | None = None) -> None:
        """Show the command's current stage, and that `done` of `total` parts of it are done; None if unknown."""
        with self._lock:
            is_new = stage != self._stage
            if self._bar is not None and self._task is not None:
                if is_new:
                    self._bar.reset(self._task)
                self._bar.update(self._task, description=stage, completed=done, total=total)
            else:
                self._show_plain(stage, is_new, done, total)
            if is_new:
                self._begin_s = time.monotonic()
            self._stage = stage

    def print(self, line: str) -> None:
        """Print a line of another program's output above the progress line."""
        with self._lock:
            self._said_s = time.monotonic()
            if self._bar is not None:
                self._console.print(Text.from_ansi(line), soft_wrap=True)
            else:
                typer.echo(line, err=True)

    def __enter__(self) -> ProgressBar:
        if self._bar is not None:
            self._bar.start()
        else:
            self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        if self._bar is not None:
            self._bar.stop()

    def _show_plain(self, stage: str, is_new: bool, done: int | None, total: int | None) -> None:
        tenths = _LINES * done // total if done is not None and total else 0
        if is_new or tenths > self._tenths:
            count = f": {done} of {total}" if tenths else ""
            self._say(f"{stage}{count}")
        self._tenths = tenths

    def _tick(self) -> None:
        while not self._is_over.wait(1.0):
            with self._lock:
                if self._stage and time.monotonic() - self._said_s > _AGAIN_S:
                    self._say(f"{self._stage} ({time.monotonic() - self._begin_s:.0f} s)")

    def _say(self, text: str) -> None:
        self._said_s = time.monotonic()
        self._console.print(f"specbranch: {text}", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def redirect_output(log_file: Path, stage: str) -> Iterator[Callable[[str], None]]:
    """Append this process's standard output and error to a file; show `stage`, and yield a function to show others."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    saved = [os.dup(number) for number in (1, 2)]
    try:
        with log_file.open("ab") as log, os.fdopen(os.dup(saved[1]), "w") as screen:
            for number in (1, 2):
                os.dup2(log.fileno(), number)
            with ProgressBar(Console(file=screen)) as progress:
                progress.show(stage)
                yield progress.show
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, number)
            os.close(copy)


class CtrlCGuard:
    """A context manager that sets `is_asked` at the first Ctrl-C; a second one raises KeyboardInterrupt.

    It must be entered in the main thread.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self._before: object = None

    def __enter__(self) -> CtrlCGuard:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked:
            raise KeyboardInterrupt
        self.is_asked = True
