"""`specbranch bench` without engines: showing results, and refusing what cannot be measured."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from specbranch.cli import app

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "planners.jsonl"
PLANNERS = ROOT / "benchmarks" / "planners.toml"
run = CliRunner().invoke


def test_the_table_names_every_method_of_every_task() -> None:
    shown = run(app, ["bench", "show", str(RESULTS)])

    assert shown.exit_code == 0
    for word in ("humaneval", "gsm8k", "bare", "sps", "pearl", "specbranch"):
        assert word in shown.output


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
