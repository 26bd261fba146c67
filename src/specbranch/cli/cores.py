"""Keeping a process to some cores, and lists of numbers on the command line."""

from __future__ import annotations

import os
from collections.abc import Iterable

from specbranch.cli.console import UsageError


def numbers(option: str, text: str) -> list[int]:
    """Whole numbers separated by commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UsageError(f"{option} is {text!r}; give whole numbers separated by commas")
    return [int(part) for part in parts]


def stay_on(text: str) -> None:
    """Keep this process to the cores named by `--cores`."""
    cores, before = numbers("--cores", text), os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cores)
    except (OSError, OverflowError) as error:
        raise _no_such_cores("--cores", cores, before) from error
    # Linux passes over cores that are not there as long as one of them is.
    if os.sched_getaffinity(0) != set(cores):
        os.sched_setaffinity(0, before)
        raise _no_such_cores("--cores", cores, before)


def check_cores(option: str, cores: Iterable[int]) -> None:
    """Raise unless this process may use all of them."""
    allowed = os.sched_getaffinity(0)
    if not set(cores) <= allowed:
        raise _no_such_cores(option, cores, allowed)


def _no_such_cores(option: str, cores: Iterable[int], before: Iterable[int]) -> UsageError:
    asked, have = (",".join(str(core) for core in sorted(some)) for some in (cores, before))
    return UsageError(f"{option} is {asked}; this process may use {have}")
