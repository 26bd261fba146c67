"""docs/dev/one-round.md names files, classes and functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.root import ROOT

PAGE = (ROOT / "docs" / "dev" / "one-round.md").read_text()
STOPS = re.findall(r"^\| \d+ \| [\w ]+ \| \w+ \| `([\w/]+\.py)` \| `([\w.]+)` \|$", PAGE, re.MULTILINE)


def names_in(path: Path) -> set[str]:
    """Functions and classes of a module, methods as `Class.method`."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
    return found


def test_the_round_has_ten_stops() -> None:
    assert len(STOPS) == 10


@pytest.mark.parametrize(("file", "name"), STOPS)
def test_every_stop_is_where_the_page_says(file: str, name: str) -> None:
    assert name in names_in(ROOT / "src" / "specbranch" / file)


def test_every_other_name_exists_somewhere() -> None:
    known = set().union(*(names_in(path) for path in (ROOT / "src" / "specbranch").rglob("*.py")))
    named = set(re.findall(r"`([A-Z]\w+\.\w+)`", PAGE))

    assert named and named <= known, named - known


def test_every_file_exists() -> None:
    for file in re.findall(r"`([\w/]+\.py)`", PAGE):
        assert (ROOT / "src" / "specbranch" / file).exists() or (ROOT / file).exists(), file
