"""Keeping the output of other libraries off the screen. They write to file descriptors, so these are redirected."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from specbranch.cli.progress import Progress


@contextmanager
def quiet(log_file: Path, stage: str) -> Iterator[Callable[[str], None]]:
    """Send standard output and error of this process to a file, and show the stage; the caller may tell others."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    saved = [os.dup(number) for number in (1, 2)]
    try:
        with log_file.open("ab") as log, os.fdopen(os.dup(saved[1]), "w") as screen:
            for number in (1, 2):
                os.dup2(log.fileno(), number)
            with Progress(Console(file=screen)) as progress:
                progress.show(stage)
                yield progress.show
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, number)
            os.close(copy)
