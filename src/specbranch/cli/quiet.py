"""Keeping the output of other libraries off the screen. They write to file descriptors, so these are redirected."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner


@contextmanager
def quiet(log_file: Path, message: str) -> Iterator[None]:
    """Send standard output and error of this process to a file, and show `message`: with a spinner on a terminal."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    saved = [os.dup(number) for number in (1, 2)]
    try:
        with log_file.open("ab") as log, os.fdopen(os.dup(saved[1]), "w") as screen:
            for number in (1, 2):
                os.dup2(log.fileno(), number)
            with _announced(Console(file=screen), message):
                yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, number)
            os.close(copy)


def _announced(console: Console, message: str) -> AbstractContextManager[object]:
    """A spinner on a terminal, else one plain line."""
    if not console.is_terminal:
        console.print(f"specbranch: {message}", highlight=False, markup=False, soft_wrap=True)
        return nullcontext()
    # Rich's own status would bring back to the screen what Python code prints.
    return Live(Spinner("dots", message), console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
