"""What GitHub reads of the repository: workflows call our scripts and nothing unpinned, and the citation is valid."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

from tests.root import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def steps(path: Path) -> list[dict[str, Any]]:
    document = yaml.safe_load(path.read_text())
    return [step for job in document["jobs"].values() for step in job["steps"]]


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actionlint_finds_nothing(path: Path) -> None:
    done = subprocess.run([tool("actionlint"), path], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_an_action_of_others_is_named_by_its_commit(path: Path) -> None:
    used = [step["uses"] for step in steps(path) if "uses" in step]

    assert used
    assert [one for one in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", one)] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_read_and_nothing_else(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    more = {name: job["permissions"] for name, job in document["jobs"].items() if "permissions" in job}

    assert document["permissions"] == {"contents": "read"}
    assert more == ({"publish": {"id-token": "write"}} if path.stem == "release" else {})


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_what_a_workflow_runs_is_a_script_of_ours(path: Path) -> None:
    words = [word for step in steps(path) for word in step.get("run", "").split()]
    scripts = [ROOT / word for word in words if word.startswith(("scripts/", ".ci/"))]

    assert scripts
    assert [script for script in scripts if script.suffix != ".py" and not os.access(script, os.X_OK)] == []


def test_the_citation_says_what_the_package_says() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert citation["cff-version"] == "1.2.0"
    assert citation["license"] == project["license"]
    assert citation["abstract"].rstrip(".") == project["description"]
    assert {"authors", "message", "title"} <= citation.keys()


def test_cffconvert_accepts_the_citation() -> None:
    command = [tool("cffconvert"), "--validate", "-i", str(ROOT / "CITATION.cff")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
