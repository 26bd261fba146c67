"""The page of benchmarks says what the committed results say, and what they do not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specbranch.bench.results import read_results, summarize
from specbranch.machine import commit_note
from tests.root import ROOT

PAGE = (ROOT / "docs" / "dev" / "benchmarks.md").read_text()
SECTIONS = PAGE.split("\n## ")[1:]
RESULTS = sorted(path for folder in ("benchmarks", "studies") for path in (ROOT / folder).rglob("*.json*"))
RUNS = [path for path in (ROOT / "benchmarks").glob("*.jsonl") if '"scenario":' in path.read_text().partition("\n")[0]]


def section_on(path: Path) -> str:
    """Return the section with the table of a result file."""
    link = f"[`{path.relative_to(ROOT)}`](../../{path.relative_to(ROOT)}), "
    (found,) = [section for section in SECTIONS if link in section]
    return found


def note_of(path: Path) -> str | None:
    text = path.read_text()
    first = json.loads(text.splitlines()[0] if path.suffix == ".jsonl" else text)
    return commit_note(first.get("provenance", {}))


def test_the_page_is_what_its_script_makes_of_the_committed_results() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "make_page.py"), "--text"]
    made = subprocess.run(command, capture_output=True, text=True, check=True)

    assert made.stdout == PAGE, "run benchmarks/make_page.py"


def test_no_range_on_the_page_has_no_width() -> None:
    ranges = re.findall(r"\((\d+\.\d\d)-(\d+\.\d\d)\)", PAGE)

    assert len(ranges) > 40
    assert [found for found in ranges if found[0] == found[1]] == []


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_a_section_has_the_notes_that_its_file_asks_for(path: Path) -> None:
    section, results = section_on(path), read_results(path)
    is_served = results.scenario.served is not None
    lines = [] if is_served else summarize(results)

    assert ("**No clean commit:**" in section) == (note_of(path) is not None)
    assert ("**Same below 100 %:**" in section) == any(line.same_as_bare < 1 for line in lines)
    assert is_served or ("(\u2013)" in section) == any(line.trials < 3 for line in lines)


def test_the_list_of_files_without_a_clean_commit_is_complete() -> None:
    (section,) = [section for section in SECTIONS if section.startswith("Result files without a clean commit")]
    listed = re.findall(r"\(\.\./\.\./([^)]+)\)", section)

    assert listed == [str(path.relative_to(ROOT)) for path in RESULTS if note_of(path)]
    assert "benchmarks/weak.jsonl" in listed
    assert "benchmarks/planners.jsonl" not in listed
