"""Flags that are nearly ours are suspected."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from specbranch.cli import app
from specbranch.launch.draft_process import DraftServiceOptions
from specbranch.plugins.vllm import installed

runner = CliRunner()


@pytest.mark.parametrize(
    ("flag", "ours"),
    [
        ("--drfat", "--draft"),
        ("--draft_device", "--draft-device"),
        ("--plannr=pearl", "--planner"),
        ("--gama", "--gamma"),
        ("--num_speculative_token", "--num-speculative-tokens"),
        ("--deadline", "--deadline-ms"),
        ("--timelin", "--timeline"),
        ("--bear", "--bare"),
    ],
)
def test_a_flag_that_is_nearly_ours_is_suspected(flag: str, ours: str) -> None:
    done = runner.invoke(app, ["serve", "t", flag, "x"])

    assert done.exit_code == 2
    assert f"unknown flag {flag.partition('=')[0]}: did you mean {ours}?" in done.stderr


@pytest.mark.parametrize("flag", ["--lora-dtype", "--seed", "--host", "--runner", "--dtype", "--port", "--device-ids"])
def test_flags_of_vllm_are_not_suspected(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "is_installed", lambda: False)
    done = runner.invoke(app, ["serve", "t", "--draft", "d", flag, "x"])

    assert "did you mean" not in done.stderr
    assert "vLLM is not installed" in done.stderr


def test_the_draft_service_gets_its_options_under_their_own_names() -> None:
    plain = DraftServiceOptions("m").arguments("ipc://x")
    full = DraftServiceOptions("m", dtype="int8", timeline="t.json", record=Path("r.gz")).arguments("ipc://x")

    assert plain == ["draft", "m", "--device", "cpu", "--listen", "ipc://x", "--until-eof"]
    files = ["--timeline", str(Path.cwd() / "t.json"), "--record", str(Path.cwd() / "r.gz")]
    assert full == [*plain[:-1], "--dtype", "int8", *files, "--until-eof"]
