"""The report: every method in its tables, every loss told, one page that needs nothing beside it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from specbranch.bench.figures import method_colors
from specbranch.bench.report import as_markdown, same_note, section_of, write_report
from specbranch.bench.results import NO_RANGE, read_results, summarize
from specbranch.machine import commit_note
from tests.root import ROOT

RESULTS = ROOT / "benchmarks"


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
    runs = [read_results(path.with_suffix(".jsonl")) for path in RESULTS.glob("*.toml")]
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


def test_a_section_says_beside_its_tables_what_must_be_read_with_them(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    weak, planners = (read_results(RESULTS / f"{name}.jsonl") for name in ("weak", "planners"))
    page = write_report([weak], tmp_path, "budget", "Notes").read_text()
    note = "No clean commit: made by a0453bb6e673 with changes that were not committed."

    assert section_of(weak, "budget").notes[0] == note
    assert f'<p class="note">{note}</p>' in page
    assert note in (tmp_path / "report.md").read_text()
    (same,) = section_of(planners, "budget").notes
    assert same.startswith("Same below 100 %: near-ties in bfloat16")


def test_why_answers_differ_depends_on_the_run() -> None:
    results = read_results(RESULTS / "planners.jsonl")
    lines = summarize(results)
    equal = [line for line in lines if line.same_as_bare == 1]

    def told(**changes: Any) -> str:
        return same_note(replace(results.scenario, **changes), lines) or ""

    assert equal
    assert same_note(results.scenario, equal) is None
    assert "near-ties in float16" in told(dtype="float16")
    assert "very rare in float32" in told(dtype="float32")
    assert "sampled" in told(temperature=1.0)


@pytest.mark.parametrize("source", [{}, {"commit": None}, {"commit": "0123abc+"}])
def test_a_commit_that_is_missing_or_was_changed_is_told(source: dict[str, str | None]) -> None:
    assert (commit_note(source) or "").startswith("No clean commit: ")
    assert commit_note({"commit": "0123abc"}) is None


def test_the_same_results_give_the_same_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = read_results(RESULTS / "planners.jsonl")
    for name in ("one", "two"):
        write_report([results], tmp_path / name, "specbranch", "Again")

    assert (tmp_path / "one" / "report.html").read_bytes() == (tmp_path / "two" / "report.html").read_bytes()
