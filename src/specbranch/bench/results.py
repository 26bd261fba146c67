"""Result files of `specbranch bench run`: a header that says where everything comes from, then one record a trial."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from specbranch.bench.scenario import BenchMethod, Scenario, scenario_of

FORMAT = "specbranch-bench"
VERSION = 1

Record = dict[str, Any]


class ResultError(ValueError):
    """A file that holds no results."""


@dataclass(frozen=True, slots=True)
class Results:
    """One run: only figures within it can be compared."""

    name: str  # of the file
    scenario: Scenario
    provenance: dict[str, Any]
    records: Sequence[Record]

    def method(self, name: str) -> BenchMethod:
        """A method of the scenario by its name."""
        return next(method for method in self.scenario.methods if method.name == name)


def header(scenario: Scenario, provenance: dict[str, Any]) -> dict[str, Any]:
    """The first line of a result file."""
    return {"format": FORMAT, "version": VERSION, "scenario": scenario.as_json(), "provenance": provenance}


def read_results(path: Path) -> Results:
    """The results in a file; a last line that was not written to its end is left out."""
    try:
        whole = path.read_text().rpartition("\n")[0]
        first, *records = (json.loads(line) for line in whole.splitlines())
    except (OSError, ValueError) as error:
        raise ResultError(f"{path} holds no results: {error}") from error
    if not isinstance(first, dict) or first.get("format") != FORMAT:
        raise ResultError(f"{path} is no result file of `specbranch bench`")
    return Results(path.name, scenario_of(first["scenario"]), first.get("provenance", {}), records)


def write_line(sink: TextIO, document: Record) -> None:
    """Write one document, at once."""
    sink.write(json.dumps(document) + "\n")
    sink.flush()


def drop_unfinished(path: Path) -> None:
    """Remove a last line that was not written to its end, so that the file can be gone on with."""
    text = path.read_bytes()
    whole = text.rfind(b"\n") + 1
    if whole < len(text):
        os.truncate(path, whole)
