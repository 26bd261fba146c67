"""How far a long command is: a moving line on a terminal, plain lines on standard error elsewhere, as in a CI log."""

from __future__ import annotations

import threading
import time
from types import TracebackType

import typer
from rich.console import Console
from rich.text import Text

from specbranch.cli.console import progress_bar

_LINES = 10  # at most, for the counts of one stage
_AGAIN_S = 15.0  # a stage that lasts is named again


class Progress:
    """A context manager; `show` is called as often as there is news. `console` None means standard error.

    Without a terminal, a stage is named when it begins and every 15 seconds while it lasts.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        # On a screen of its own it stands beside what Python code prints, and leaves that where it goes.
        self._bar = progress_bar(self._console, takes_output=console is None) if self._console.is_terminal else None
        self._task = self._bar.add_task("", total=None) if self._bar else None
        self._stage = ""
        self._tenths = 0
        self._begin_s = self._said_s = time.monotonic()
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="progress", daemon=True)

    def show(self, stage: str, done: int | None = None, total: int | None = None) -> None:
        """Say which stage the command is in, and how much of it is done."""
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
        """Print a line of somebody else's output, above the line that moves."""
        with self._lock:
            self._said_s = time.monotonic()
            if self._bar is not None:
                self._console.print(Text.from_ansi(line), soft_wrap=True)
            else:
                typer.echo(line, err=True)

    def __enter__(self) -> Progress:
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
