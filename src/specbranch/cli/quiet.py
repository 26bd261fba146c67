"""Keeping the talk of other libraries off the screen. They write to the descriptors themselves, so these are turned."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner


@contextmanager
def quiet(log_file: Path, message: str) -> Iterator[None]:
    """Send standard output and error of this process to a file; on a terminal a spinner turns meanwhile."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    saved = [os.dup(number) for number in (1, 2)]
    try:
        with log_file.open("ab") as log, os.fdopen(os.dup(saved[1]), "w") as screen:
            for number in (1, 2):
                os.dup2(log.fileno(), number)
            with _spinner(Console(file=screen), message):
                yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, number)
            os.close(copy)


def _spinner(console: Console, message: str) -> Live:
    """Rich's own would bring back to the screen what Python code prints."""
    return Live(Spinner("dots", message), console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
