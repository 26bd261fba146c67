"""`specbranch timeline` as a person and as a machine would call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specbranch.cli import app
from tests.bench.test_timeline import known_run

runner = CliRunner()


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    known_run().write(path)
    return path


def test_the_table_and_the_document_hold_the_same_figures(run_file: Path) -> None:
    done = runner.invoke(app, ["timeline", str(run_file), "--json"])
    (target,) = json.loads(done.stdout)["targets"]

    assert done.exit_code == 0
    assert (target["target"], round(target["busy"], 6), target["rounds"]) == ("target 1: specbranch", 0.75, 10)
    assert "75%" in done.stderr and "25.0%" in done.stderr


@pytest.mark.parametrize("stretch", [[], ["--from", "0.1"], ["--from", "0.1", "--to", "0.3"]])
def test_a_picture_is_drawn(run_file: Path, tmp_path: Path, stretch: list[str]) -> None:
    pytest.importorskip("matplotlib")
    done = runner.invoke(app, ["timeline", str(run_file), "--plot", str(tmp_path / "out.png"), *stretch])

    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "3", "--to", "2"], "not before"),
        (["--from", "300"], "choose another range"),
        (["--plot", "out.txt"], "end its name in"),
        (["--replay", "out.txt"], "give a name that ends in"),
        (["--replay", "out.html"], "no draft trees"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(run_file: Path, arguments: list[str], message: str) -> None:
    done = runner.invoke(app, ["timeline", str(run_file), *arguments])

    assert done.exit_code == 2
    assert message in done.stderr


def test_a_timeline_to_a_directory_that_is_not_there_is_refused_before_the_model_loads() -> None:
    done = runner.invoke(app, ["draft", "nowhere", "--timeline", "/no/such/place/run.json"])

    assert done.exit_code == 2
    assert "there is no directory" in done.stderr
