"""`specbranch check`: options that are wrong or do not go together end with code 2, before any engine starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specbranch.cli import app
from specbranch.plugins.vllm import installed

runner = CliRunner()


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "runs_on_cpu", lambda: True)
    monkeypatch.setattr(installed, "is_installed", lambda: True)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (["--planner", "none"], "nothing would be checked; choose another"),
        (["--planner", "perl"], "pearl"),
        (["--alpha", "0"], "give a number between 0 and 1"),
        (["--vllm-arg", "x"], "--vllm-arg is 'x'; give KEY=VALUE"),
        (["--report", "/no/such/place/report.md"], "there is no directory"),
        (["--target-cores", "0,999"], "this process may use"),
        (["--draft-cores", "one"], "give whole numbers"),
        (["--tensor-parallel-size", "999"], "999 workers need as many cores"),
        (["-tp=two"], "tensor_parallel_size is 'two'; give a whole number"),
        (["--plannr", "pearl"], "unknown flag --plannr: did you mean --planner?"),
        (["--quick", "word"], "unexpected word 'word'"),
        (["--additional-config.specbranch.planner", "pearl"], "sets specbranch.planner, which this command sets"),
        (["--additional-config.specbranch.pads", "on"], "did you mean 'pad'"),
    ],
)
def test_wrong_options_name_their_advice(options: list[str], advice: str) -> None:
    result = runner.invoke(app, ["check", "target", "--draft", "draft", *options])

    assert result.exit_code == 2
    assert advice in result.stderr


def test_a_draft_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "is_installed", lambda: True)
    (tmp_path / "config.json").write_text("{}")
    core = str(min(os.sched_getaffinity(0)))
    result = runner.invoke(app, ["check", str(tmp_path), "--draft", "no/such/draft.gguf", "--draft-cores", core])

    assert result.exit_code == 2
    assert "--draft: there is no no/such/draft.gguf" in result.stderr
