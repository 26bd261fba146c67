"""The lock files: every package that is installed is named exactly, with hashes, and from no particular place."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.root import ROOT

LOCKS = sorted((ROOT / "locks").glob("*.txt"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {
    "runtime": (),
    "light": ("bench", "dev", "docs"),
    "engines": ("bench", "dev", "metrics", "torch", "llamacpp"),
}
_PINNED = re.compile(r"([a-z0-9-]+)==(\S+)(?: ; [^\\]+)? \\")


def blocks(path: Path) -> list[list[str]]:
    """The lines of each package."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    starts = [number for number, line in enumerate(lines) if not line.startswith(" ")]
    return [lines[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_every_package_is_pinned_and_has_hashes(path: Path) -> None:
    for first, *hashes in blocks(path):
        assert _PINNED.fullmatch(first), first
        assert hashes
        assert all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line) for line in hashes), first


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_no_place_is_named(path: Path) -> None:
    assert not re.search(r"://|--(extra-)?index|--find-links", path.read_text())


@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_has_what_the_package_asks_for(name: str) -> None:
    """Torch is installed by its version alone: which build is right depends on the machine."""
    found = [match for first, *_ in blocks(ROOT / "locks" / f"{name}.txt") if (match := _PINNED.fullmatch(first))]
    versions = {match[1]: match[2] for match in found}
    asked = [
        *PROJECT["dependencies"],
        *(one for extra in EXTRAS[name] for one in PROJECT["optional-dependencies"][extra]),
    ]
    for requirement in map(Requirement, asked):
        if requirement.name != "torch":
            version = versions.get(canonicalize_name(requirement.name), "0")
            assert requirement.specifier.contains(version), f"{requirement}: run scripts/lock"


@pytest.mark.parametrize(
    ("packages", "error", "is_bad", "line"),
    [
        ([{"name": "a", "version": "1", "vulns": []}], "", False, "no known vulnerabilities in 1 packages"),
        ([{"name": "a", "version": "1", "vulns": [{"id": "CVE-1"}]}], "", True, "a 1 (CVE-1)"),
        ([{"name": "a", "skip_reason": "not found"}], "", False, "NOT AUDITED: 1 of 1"),
        (None, "Max retries exceeded", False, "NOT AUDITED, audit it where there is a network: Max retries exceeded"),
    ],
)
def test_an_audit_that_did_not_happen_is_not_called_clean(
    packages: list[object] | None, error: str, is_bad: bool, line: str
) -> None:
    verdict = runpy.run_path(str(ROOT / "scripts" / "audit.py"))["verdict"]
    found = verdict("" if packages is None else json.dumps({"dependencies": packages}), error)

    assert found[0] is is_bad
    assert line in found[1]
