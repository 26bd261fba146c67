"""`specbranch plan` without engines: what it refuses, and what it says."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specbranch.bench.forecast import advise
from specbranch.bench.survey import Survey
from specbranch.cli import app
from specbranch.cli.plan import _sentences
from specbranch.plugins.vllm import compat
from specbranch.simulation.presets import Pair, make_trace

TRACE = make_trace(Pair("made", 5.0, 5, 0.85, ""), 8, 60, random.Random(0))
run = CliRunner().invoke


def said(draft_s: dict[int, float]) -> str:
    survey = Survey({1: 0.1, 2: 0.101}, 0.11, draft_s, TRACE)
    return "\n".join(_sentences(survey, advise(survey, ["none", "pearl"], [1, 4])))


def test_it_says_whether_it_pays_and_with_what() -> None:
    cheap = said({1: 0.02, 2: 0.021})

    assert "it pays: --planner pearl --set gamma=" in cheap
    assert "c is 5.5" in cheap
    assert "a second draft device" in cheap
    assert "it does not pay" in said({1: 0.2, 2: 0.3})


def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compat, "is_installed", lambda: True)
    for words, message in (
        (["--concurrency", "0"], "from 1 on"),
        (["--prompts", str(tmp_path / "none.jsonl")], "cannot read"),
    ):
        refused = run(app, ["plan", "t", "--draft", "d", *words])

        assert refused.exit_code == 2
        assert message in " ".join(refused.output.split())
