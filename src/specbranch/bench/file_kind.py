"""What kind of file somebody gave us: for messages that say which command reads it."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from specbranch.trace import FORMAT as TRACE

RESULTS = "specbranch-bench"  # the format that a result file names in its first line
_BEGIN_LEN = 1 << 16
_GZIP = b"\x1f\x8b"


def kind_of(path: Path) -> str:
    """A phrase such as "a timeline; `specbranch timeline` reads it"; a file that cannot be read raises OSError."""
    with path.open("rb") as file:
        begin = file.read(_BEGIN_LEN)
    is_gzip = begin.startswith(_GZIP)
    if is_gzip:
        begin = _decompressed(path)
    if b'"traceEvents"' in begin:
        return "a timeline; `specbranch timeline` reads it"
    name = _format(begin)
    if name == TRACE:
        return "a trace of verdicts; `specbranch simulate --trace` reads it"
    if name == RESULTS:
        return "a result file of `specbranch bench run`; `specbranch bench show` reads it"
    if is_gzip:
        return "a gzip file of another program"
    return "empty" if not begin.strip() else "not a file that specbranch wrote"


def _decompressed(path: Path) -> bytes:
    try:
        with gzip.open(path) as file:
            return file.read(_BEGIN_LEN)
    except (OSError, EOFError, zlib.error):
        return b""


def _format(begin: bytes) -> Any:
    """The format that the first line names, if it is JSON."""
    try:
        first = json.loads(begin.partition(b"\n")[0])
    except (ValueError, RecursionError):
        return None
    return first.get("format") if isinstance(first, dict) else None
