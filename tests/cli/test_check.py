"""`specbranch check`: options that are wrong or do not go together end with code 2, before any engine starts."""

from __future__ import annotations

import os

import pytest
import typer
from typer.testing import CliRunner

from specbranch.cli.check import check

runner = CliRunner()
app = typer.Typer()
app.command()(check)


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (["--planner", "none"], "nothing would be checked; choose another"),
        (["--planner", "perl"], "pearl"),
        (["--alpha", "0"], "give a number between 0 and 1"),
        (["--vllm-arguments", "x"], "--vllm-arguments is no JSON"),
        (["--vllm-arguments", "[]"], "must be a JSON object"),
        (["--target-cores", "0,999"], "this process may use"),
        (["--draft-cores", "one"], "give whole numbers"),
    ],
)
def test_wrong_options_name_their_advice(options: list[str], advice: str) -> None:
    result = runner.invoke(app, ["target", "--draft", "draft", *options])

    assert result.exit_code == 2
    assert advice in result.stderr


def test_a_draft_that_does_not_start_is_named() -> None:
    core = str(min(os.sched_getaffinity(0)))
    result = runner.invoke(app, ["target", "--draft", "no/such/draft.gguf", "--draft-cores", core])

    assert result.exit_code == 2
    assert "the draft service for no/such/draft.gguf ended with code 2" in result.stderr
