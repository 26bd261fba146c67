"""Progress without a terminal: plain lines on standard error, a few for each stage."""

from __future__ import annotations

import pytest

from specbranch.cli.console import ProgressBar


def test_every_stage_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar() as progress:
        progress.show("loading")
        progress.show("loading")
        progress.show("simulating")

    assert capsys.readouterr() == ("", "specbranch: loading\nspecbranch: simulating\n")


def test_a_long_stage_says_how_far_it_is_at_most_ten_times(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar() as progress:
        for done in range(1001):
            progress.show("measuring", done, 1000)
    lines = capsys.readouterr().err.splitlines()

    assert lines[:2] == ["specbranch: measuring", "specbranch: measuring: 100 of 1000"]
    assert lines[-1] == "specbranch: measuring: 1000 of 1000"
    assert len(lines) == 11


def test_a_stage_without_a_total_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar() as progress:
        progress.show("measuring", 3, 0)
        progress.show("measuring", 4, None)

    assert capsys.readouterr().err == "specbranch: measuring\n"
