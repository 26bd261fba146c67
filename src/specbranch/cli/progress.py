"""How far a long command is: a bar on a terminal, plain lines on standard error elsewhere, as in a CI log."""

from __future__ import annotations

from types import TracebackType

import typer
from rich.console import Console

from specbranch.cli.console import progress_bar

_LINES = 10  # at most, for the counts of one stage


class Progress:
    """A context manager; `show` is called as often as there is news."""

    def __init__(self) -> None:
        self._bar = progress_bar() if Console(stderr=True).is_terminal else None
        self._task = self._bar.add_task("", total=None) if self._bar else None
        self._stage = ""
        self._tenths = 0

    def show(self, stage: str, done: int | None = None, total: int | None = None) -> None:
        """Say which stage the command is in, and how much of it is done."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=stage, completed=done, total=total)
            return
        tenths = _LINES * done // total if done is not None and total else 0
        if stage != self._stage or tenths > self._tenths:
            count = f": {done} of {total}" if tenths else ""
            typer.echo(f"specbranch: {stage}{count}", err=True)
        self._stage, self._tenths = stage, tenths

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
