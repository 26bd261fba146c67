"""Figures that tests measure: calls of Python code, which are the same on every machine, and records of the rest."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any


def record(name: str, **figures: float | int | str) -> None:
    """Append one measurement to `name`.jsonl in the directory that SPECBRANCH_RESULTS names, if it names one."""
    directory = os.environ.get("SPECBRANCH_RESULTS")
    if directory:
        with (Path(directory) / f"{name}.jsonl").open("a") as sink:
            sink.write(json.dumps(figures) + "\n")


def num_calls(work: Callable[[], object]) -> int:
    """Run `work` and return how many functions of Python and of C this thread called."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count
