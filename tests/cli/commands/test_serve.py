"""`specbranch serve` without engines; with them it is tested in tests/vllm."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from specbranch.cli import app
from specbranch.cli.commands.serve import _Plan, _summary, _uninterrupted
from specbranch.core.planners import SettingError
from specbranch.errors import FlagError
from specbranch.launch.vllm_flags import Flags
from specbranch.launch.vllm_server import HttpEndpoint


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_vllm_is_being_started_is_heard_when_it_is(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    is_started = False
    with pytest.raises(KeyboardInterrupt), _uninterrupted():
        signal.raise_signal(number)
        is_started = True

    assert is_started
    assert signal.getsignal(number) is before


def test_without_a_signal_nothing_happens() -> None:
    with _uninterrupted():
        pass


def plan_of(*words: str, is_bare: bool = False, **section: Any) -> _Plan:
    return _Plan(
        target="big",
        draft=None,
        remote=None,
        is_bare=is_bare,
        target_cores=(0, 1),
        gamma=4,
        section={"planner": "budget", **section},
        flags=Flags(list(words)),
    )


def test_without_a_draft_vllm_is_told_to_draft_from_the_text() -> None:
    words = plan_of().options(None).arguments()
    config = json.loads(words[words.index("--additional-config") + 1])

    assert config["specbranch"]["address"] is None and config["specbranch"]["planner"] == "budget"
    assert "--speculative-config" in words
    assert "--speculative-config" not in plan_of(is_bare=True).options(None).arguments()


def test_the_summary_says_where_drafts_come_from() -> None:
    plan = plan_of()
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(_summary(plan, plan.settings(), None, HttpEndpoint.of(plan.flags)))
    lines = dict(line.split(maxsplit=1) for line in console.export_text().splitlines())

    assert lines["drafts"].strip() == "from the text (no draft model)"
    assert not {"draft", "socket", "deadline"} & lines.keys()


def test_a_planner_that_needs_a_draft_model_is_refused_without_one() -> None:
    with pytest.raises(SettingError, match="name a draft, or use planner 'budget'"):
        plan_of(planner="specbranch").settings()
    with pytest.raises(FlagError, match=r"sets specbranch\.address, which this command sets"):
        plan_of("--additional-config", '{"specbranch": {"address": "ipc:///d"}}').settings()


@pytest.mark.parametrize("other", [["--bare"], ["--draft-address", "ipc:///d"]])
def test_a_draft_and_its_opposite_are_refused(other: list[str]) -> None:
    done = CliRunner().invoke(app, ["serve", "big", "--draft", "small", *other])

    assert done.exit_code == 2 and "give only one of --draft MODEL" in " ".join(done.stderr.split())


@pytest.mark.parametrize("other", [["--bare"], ["--draft-address", "ipc:///d"], []])
def test_recordings_of_a_service_that_serve_does_not_start_are_refused(other: list[str], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["serve", "target", *other, "--record", str(tmp_path / "record.gz")])

    assert done.exit_code == 2 and "belong to the draft service that --draft starts" in " ".join(done.stderr.split())
