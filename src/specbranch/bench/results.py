"""Result files of `specbranch bench run`: a header with scenario and provenance, then one record for each trial."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from specbranch.bench.file_kind import RESULTS, kind_of
from specbranch.bench.scenario import BenchMethod, Scenario, scenario_of
from specbranch.errors import SpecBranchError

VERSION = 1

Record = dict[str, Any]


class ResultError(SpecBranchError, ValueError):
    """A file that is not a readable result file."""


@dataclass(frozen=True, slots=True)
class Results:
    """One run; only numbers within one run can be compared."""

    name: str  # of the file
    scenario: Scenario
    provenance: dict[str, Any]
    records: Sequence[Record]

    def method(self, name: str) -> BenchMethod:
        """A method of the scenario by its name."""
        return next(method for method in self.scenario.methods if method.name == name)


def header(scenario: Scenario, provenance: dict[str, Any]) -> dict[str, Any]:
    """The first line of a result file."""
    return {"format": RESULTS, "version": VERSION, "scenario": scenario.as_json(), "provenance": provenance}


def read_results(path: Path) -> Results:
    """The results in a file; an incomplete last line is left out."""
    try:
        kind = kind_of(path)
    except OSError as error:
        raise ResultError(f"cannot read {path}: {error.strerror}") from error
    if "bench show" not in kind:
        raise ResultError(f"{path} is not a result file of `specbranch bench run`: it is {kind}")
    try:
        whole = path.read_text().rpartition("\n")[0]
        first, *records = (json.loads(line) for line in whole.splitlines())
        return Results(path.name, scenario_of(first["scenario"]), first.get("provenance", {}), records)
    except (ValueError, KeyError) as error:
        raise ResultError(f"{path} is a damaged result file ({type(error).__name__}: {error})") from error


def write_line(sink: TextIO, document: Record) -> None:
    """Write one document and flush it."""
    sink.write(json.dumps(document) + "\n")
    sink.flush()


def drop_unfinished(path: Path) -> None:
    """Remove an incomplete last line, so that the run can be resumed."""
    text = path.read_bytes()
    whole = text.rfind(b"\n") + 1
    if whole < len(text):
        os.truncate(path, whole)
