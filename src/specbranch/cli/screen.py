"""Streams text to a terminal, with a line of stats below it; without a terminal only the plain text."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TextIO

from specbranch.cli.painter import Run

_GREEN, _DIM, _PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"
_SAVE, _RESTORE, _CLEAR = "\x1b7", "\x1b8", "\x1b[2K"
_EVERY_S = 0.1
# A model may emit terminal escape sequences.
_HARMLESS = {code: None for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}


class Screen:
    """Writes runs of text, drafted ones in green. Inside the context the terminal's last line shows stats."""

    def __init__(
        self,
        file: TextIO,
        is_terminal: bool,
        has_colors: bool,
        clock: Callable[[], float] = time.monotonic,
        size: Callable[[], tuple[int, int]] = shutil.get_terminal_size,
    ) -> None:
        self._file = file
        self._is_terminal = is_terminal
        self._has_colors = has_colors
        self._clock = clock
        self._size = size
        self._shown: tuple[int, int] | None = None  # the terminal size for which the last line is reserved
        self._drawn_s = -1.0

    def write(self, runs: Iterable[Run]) -> None:
        """Append text."""
        for run in runs:
            text = run.text.translate(_HARMLESS) if self._is_terminal else run.text
            is_green = self._has_colors and run.is_drafted
            self._file.write(f"{_GREEN}{text}{_PLAIN}" if is_green else text)
        self._file.flush()

    def show_stats(self, stats: str) -> None:
        """Rewrite the last line, at most ten times a second."""
        if self._shown is None or self._clock() - self._drawn_s < _EVERY_S:
            return
        self._drawn_s = self._clock()
        if self._size() != self._shown:
            self._reserve_last_line()
        columns, lines = self._shown
        line = f"{_DIM}{stats[: columns - 1]}{_PLAIN}" if self._has_colors else stats[: columns - 1]
        self._file.write(f"{_SAVE}\x1b[{lines};1H{_CLEAR}{line}{_RESTORE}")
        self._file.flush()

    def __enter__(self) -> Screen:
        if self._is_terminal:
            # Move up one line if the cursor is on the last one.
            self._file.write("\n\x1b[A")
            self._reserve_last_line()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown is not None:
            self._file.write(f"{_SAVE}\x1b[{self._shown[1]};1H{_CLEAR}\x1b[r{_RESTORE}")
            self._file.flush()
            self._shown = None

    def _reserve_last_line(self) -> None:
        self._shown = self._size()
        # Setting the scroll region moves the cursor, so it is restored.
        self._file.write(f"{_SAVE}\x1b[1;{max(1, self._shown[1] - 1)}r{_RESTORE}")
