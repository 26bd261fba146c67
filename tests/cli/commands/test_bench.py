"""`specbranch bench` without engines: showing results, and refusing what cannot be measured."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specbranch.bench.results import NO_RANGE
from specbranch.cli import app
from tests.root import ROOT

RESULTS = ROOT / "benchmarks" / "planners.jsonl"
PLANNERS = ROOT / "benchmarks" / "planners.toml"
run = CliRunner().invoke


def test_the_table_names_every_method_of_every_task() -> None:
    shown = run(app, ["bench", "show", str(RESULTS)])

    assert shown.exit_code == 0
    for word in ("humaneval", "gsm8k", "bare", "sps", "pearl", "specbranch"):
        assert word in shown.output
    assert "…" not in shown.output


def test_a_trial_alone_has_no_range_and_equality_is_explained() -> None:
    shown = run(app, ["bench", "show", str(ROOT / "benchmarks" / "duel.jsonl")])
    text = " ".join(shown.stdout.split())

    assert f" {NO_RANGE} " in text
    assert not re.search(r"(\d\.\d\d)-\1", text)
    assert "Less than 100 % is expected in bfloat16" in text
    assert "No clean commit" not in text


def test_a_result_without_a_clean_commit_is_marked() -> None:
    shown = run(app, ["bench", "show", str(ROOT / "benchmarks" / "weak.jsonl")])

    assert "No clean commit: made by a0453bb6e673" in " ".join(shown.stdout.split())


def test_a_range_that_is_not_there_is_null_in_json() -> None:
    shown = run(app, ["bench", "show", str(ROOT / "benchmarks" / "duel.jsonl"), "--json"])
    lines = json.loads(shown.stdout.splitlines()[-1])["lines"]

    assert {(line["speed"]["low"], line["speed"]["high"]) for line in lines} == {(None, None)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b'{"format": "specbranch-trace"}\n', mtime=0), "it is a trace of verdicts"),
        (b'{"traceEvents": []}', "it is a timeline"),
        (b"name = 1", "not a file that specbranch wrote"),
    ],
)
def test_another_file_is_called_what_it_is(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    refused = run(app, ["bench", "show", str(path)])

    assert refused.exit_code == 2
    assert message in refused.stderr


def test_json_is_one_document_on_the_last_line() -> None:
    shown = run(app, ["bench", "show", str(RESULTS), "--json"])
    document = json.loads(shown.stdout.splitlines()[-1])

    assert document["scenario"]["name"] == "planners"
    speeds = {(line["task"], line["method"]): line["speed"]["value"] for line in document["lines"]}
    assert speeds["humaneval", "bare"] == 1.0
    assert speeds["humaneval", "specbranch"] > speeds["humaneval", "sps"] > 1.0


def test_results_are_never_written_over_and_never_mixed(tmp_path: Path) -> None:
    there = tmp_path / "there.jsonl"
    there.write_text(RESULTS.read_text())
    other = tmp_path / "other.toml"
    other.write_text(PLANNERS.read_text().replace("gamma = 5", "gamma = 7"))
    for scenario, options, message in (
        (PLANNERS, [], "File exists"),
        (other, ["--resume"], "of another scenario"),
        (tmp_path / "none.toml", [], "cannot read"),
    ):
        arguments = ["bench", "run", str(scenario), "--data", str(tmp_path), "--out", str(there), *options]
        refused = run(app, arguments)

        assert refused.exit_code == 2
        assert message in " ".join(refused.output.split())
    assert there.read_text() == RESULTS.read_text()
