"""The report: every method in its tables, every loss told, one page that needs nothing beside it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specbranch.bench.figures import method_colors
from specbranch.bench.report import as_markdown, section_of, write_report
from specbranch.bench.results import read_results
from specbranch.bench.summary import NO_RANGE

RESULTS = Path(__file__).parents[2] / "benchmarks"


def test_a_report_of_real_results_can_be_read_by_itself(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    read = [read_results(RESULTS / name) for name in ("planners.jsonl", "flagship-load.jsonl")]
    page = write_report(read, tmp_path, "sps", "Two <runs>").read_text()
    text = (tmp_path / "report.md").read_text()

    assert "Two &lt;runs&gt;" in page
    assert not re.search(r'(src|href)="(?!#)[^"]*"', re.sub(r'xlink:href="#[^"]*"', "", page))
    assert page.count("<svg") == len(list(tmp_path.glob("*.svg"))) >= 4
    for word in ("humaneval", "gsm8k, 8 at once", "| specbranch |", "mean of the tasks"):
        assert word in text
    # Taking turns is not the fastest way of this run, and a report on it says so.
    assert re.search(r"- humaneval: specbranch is 1\.\d\d times as fast as sps", text)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (tmp_path / link).stat().st_size > 1000


def test_every_method_has_a_color_of_its_own() -> None:
    runs = [read_results(path.with_suffix(".jsonl")) for path in RESULTS.glob("*.toml") if path.stem != "timeline"]
    assert len(runs) > 5
    for results in runs:
        methods = results.scenario.methods
        colors = method_colors(methods)

        assert len(set(colors.values())) == len(colors) == len(methods), results.name


def test_equality_with_bare_vllm_is_explained_and_one_trial_has_no_range() -> None:
    text = as_markdown("Few", [section_of(read_results(RESULTS / "duel.jsonl"), "specbranch")])

    assert "Less than 100 % is expected in bfloat16" in text
    assert "(2 trials)" in text
    for row in text.splitlines():
        cells = row.split(" | ")
        assert len(cells) != 15 or cells[4] in ("", NO_RANGE, "95 % of resamples", "---"), row


def test_the_same_results_give_the_same_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = read_results(RESULTS / "planners.jsonl")
    for name in ("one", "two"):
        write_report([results], tmp_path / name, "specbranch", "Again")

    assert (tmp_path / "one" / "report.html").read_bytes() == (tmp_path / "two" / "report.html").read_bytes()
