"""`specbranch check`: options that are wrong or do not go together end with code 2, before any engine starts."""

from __future__ import annotations

import os

import pytest
from typer.testing import CliRunner

from specbranch.cli import app

runner = CliRunner()


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (["--planner", "none"], "nothing would be checked; choose another"),
        (["--planner", "perl"], "pearl"),
        (["--alpha", "0"], "give a number between 0 and 1"),
        (["--vllm-arg", "x"], "--vllm-arg is 'x'; give KEY=VALUE"),
        (["--vllm-arguments", "x"], "--vllm-arguments is not a JSON object"),
        (["--vllm-arguments", "[]"], "--vllm-arguments is not a JSON object"),
        (["--report", "/no/such/place/report.md"], "there is no directory"),
        (["--target-cores", "0,999"], "this process may use"),
        (["--draft-cores", "one"], "give whole numbers"),
    ],
)
def test_wrong_options_name_their_advice(options: list[str], advice: str) -> None:
    result = runner.invoke(app, ["check", "target", "--draft", "draft", *options])

    assert result.exit_code == 2
    assert advice in result.stderr


def test_a_draft_that_does_not_start_is_named() -> None:
    core = str(min(os.sched_getaffinity(0)))
    result = runner.invoke(app, ["check", "target", "--draft", "no/such/draft.gguf", "--draft-cores", core])

    assert result.exit_code == 2
    assert "the draft service for no/such/draft.gguf ended with code 2" in result.stderr
