"""The result file: one line for each release, the oldest first, with its provenance and what was run on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[2] / "benchmarks" / "matrix.jsonl"


def read(file: Path = FILE) -> dict[str, dict[str, Any]]:
    """What is known of each release, the oldest first."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {line["release"]: line for line in map(json.loads, lines)}


def write(results: dict[str, dict[str, Any]], file: Path = FILE) -> None:
    """Replace the file at once: a run that is interrupted loses nothing."""
    ordered = sorted(results.values(), key=lambda line: numbers(line["release"]))
    draft = file.with_suffix(".new")
    draft.write_text("".join(json.dumps(line) + "\n" for line in ordered))
    draft.replace(file)


def has_passed(line: dict[str, Any]) -> bool:
    """Whether everything that was run on a release passed."""
    return all(run["passed"] for run in line["runs"].values())


def numbers(release: str) -> tuple[int, ...]:
    """A release as numbers that can be compared."""
    return tuple(map(int, release.split(".")))
