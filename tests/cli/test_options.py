"""Old names of options work with a warning; flags that are nearly ours are suspected."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from specbranch.cli import app
from specbranch.cli.options import _OLD_NAMES, with_new_names
from specbranch.plugins.vllm.compat import launch
from specbranch.service.process import DraftOptions

runner = CliRunner()

# command, words under an old name, the same words under the new one
OLD = [
    ("serve", "--trace run.json", "--timeline run.json"),
    ("generate", "--trace run.json", "--timeline run.json"),
    ("plan", "--trace t.jsonl.gz", "--record t.jsonl.gz"),
    ("plan", "--count 3", "--num-prompts 3"),
    ("plan", "--answer 32", "--max-tokens 32"),
    ("check", "--prompts 4", "--num-prompts 4"),
    ("check", "--tokens 16", "--num-tokens 16"),
    ("check", "--samples 32", "--num-samples 32"),
    ("check", "--draft-len 4", "--gamma 4"),
    ("profile", "--model m.gguf", "m.gguf"),
    ("draft", "--model m.gguf", "m.gguf"),
    ("draft", "--trace run.json", "--timeline run.json"),
    ("collect", "--prompts gsm8k=f:3", "--task gsm8k=f:3"),
    ("collect", "--answer 32", "--max-tokens 32"),
]


@pytest.mark.parametrize(("command", "old", "new"), OLD, ids=lambda words: words.replace(" ", "_"))
def test_an_old_name_is_the_new_one_with_a_warning(
    command: str, old: str, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["x", *old.split(), "--seed", "1"]
    name, _, value = old.partition(" ")

    assert with_new_names(command, words) == ["x", *new.split(), "--seed", "1"]
    warning = capsys.readouterr().err
    what = new.split()[0] if new.startswith("-") else "the argument MODEL"
    assert warning == f"warning: {name} is now {what}; the old name will go in the next release\n"
    assert with_new_names(command, [f"{name}={value}"]) == new.split()
    capsys.readouterr()
    assert with_new_names(command, ["x", *new.split()]) == ["x", *new.split()]
    assert capsys.readouterr().err == ""


def test_every_old_name_is_tested() -> None:
    tested = {(command, old.split()[0]) for command, old, _ in OLD} | {("check", "--vllm-arguments")}

    assert tested == {(command, old) for command, names in _OLD_NAMES.items() for old in names}


def test_a_json_object_becomes_one_argument_for_each_key(capsys: pytest.CaptureFixture[str]) -> None:
    words = with_new_names("check", ["t", "--vllm-arguments", '{"enforce_eager": false, "dtype": "half"}'])

    assert words == ["t", "--vllm-arg", "enforce_eager=false", "--vllm-arg", 'dtype="half"']
    assert "--vllm-arguments is now --vllm-arg" in capsys.readouterr().err


def test_words_behind_two_dashes_are_left_alone() -> None:
    assert with_new_names("serve", ["t", "--", "--trace", "x"]) == ["t", "--", "--trace", "x"]


def test_simulate_still_reads_a_trace() -> None:
    assert with_new_names("simulate", ["--trace", "x"]) == ["--trace", "x"]


@pytest.mark.parametrize(
    ("words", "warning", "error"),
    [
        (["draft", "--model", "x", "--cores", "one"], "--model is now the argument MODEL", "whole numbers"),
        (["draft", "x", "--trace", "/no/such/place/t"], "--trace is now --timeline", "--timeline is /no/such/place/t"),
        (["profile", "--model", "x", "--rows", "2"], "--model is now the argument MODEL", "give 1 and"),
        (["check", "t", "--draft", "d", "--samples", "1"], "--samples is now --num-samples", "'--num-samples'"),
        (["plan", "t", "--draft", "d", "--answer", "1"], "--answer is now --max-tokens", "'--max-tokens'"),
        (["generate", "t", "--draft", "d", "--prompt", "x", "--trace", "/no/such/place/t"], "--timeline", "--timeline"),
        (["train", "collect", "t", "--draft", "d", "--out", "o", "--prompts", "x"], "--task", "TASK=FILE:COUNT"),
        (["draft", "x", "--trace"], "--trace is now --timeline", "--timeline"),
    ],
)
def test_old_names_reach_the_command(words: list[str], warning: str, error: str) -> None:
    done = runner.invoke(app, words)

    assert done.exit_code == 2
    assert done.stderr.count("warning: ") == 1
    assert warning in done.stderr and error in done.stderr


@pytest.mark.parametrize(
    ("flag", "ours"),
    [
        ("--drfat", "--draft"),
        ("--draft_device", "--draft-device"),
        ("--plannr=pearl", "--planner"),
        ("--gama", "--gamma"),
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
    monkeypatch.setattr(launch, "is_installed", lambda: False)
    done = runner.invoke(app, ["serve", "t", "--draft", "d", flag, "x"])

    assert "did you mean" not in done.stderr
    assert "vLLM is not installed" in done.stderr


def test_the_draft_service_gets_its_options_under_their_own_names() -> None:
    plain = DraftOptions("m").arguments("ipc://x")
    full = DraftOptions("m", dtype="int8", timeline="t.json", record=Path("r.gz")).arguments("ipc://x")

    assert plain == ["draft", "m", "--device", "cpu", "--listen", "ipc://x", "--until-eof"]
    files = ["--timeline", str(Path.cwd() / "t.json"), "--record", str(Path.cwd() / "r.gz")]
    assert full == [*plain[:-1], "--dtype", "int8", *files, "--until-eof"]
