"""Figures that tests measure: printed always, and kept as JSON lines when SPECBRANCH_RESULTS names a directory."""

from __future__ import annotations

import json
import os
from pathlib import Path


def record(name: str, **figures: float | int | str) -> None:
    """Append one measurement to `name`.jsonl."""
    directory = os.environ.get("SPECBRANCH_RESULTS")
    if directory:
        with (Path(directory) / f"{name}.jsonl").open("a") as sink:
            sink.write(json.dumps(figures) + "\n")
