"""The help: commands in order and in groups, each with one plain sentence, its defaults and an example."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from specbranch.cli import app
from specbranch.cli.console import ProgressBar

runner = CliRunner(env={"COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1"})
ORDER = ["serve", "generate", "quantize", "plan", "check", "bench", "simulate", "timeline", "profile", "train"]
ORDER += ["draft", "keys", "ping", "describe", "top", "drain"]
GROUPS = {"bench": ["run", "show", "report"], "train": ["collect", "fit"]}
COMMANDS = [[name] for name in ORDER if name not in GROUPS] + [
    [group, name] for group, names in GROUPS.items() for name in names
]


def help_of(*words: str) -> str:
    shown = runner.invoke(app, [*words, "--help"])
    assert shown.exit_code == 0
    return shown.stdout


def plain(text: str) -> str:
    """Without frames and line breaks."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())


def test_commands_are_in_the_order_of_their_use() -> None:
    listed = re.findall(r"^│ ([a-z]+) ", help_of(), re.MULTILINE)

    assert [name for name in listed if name in ORDER] == ORDER
    assert [f"─ {panel} ─" in help_of() for panel in ("Use", "Evaluate", "Study", "Operate")] == [True] * 4


@pytest.mark.parametrize("words", [[], ["bench"], ["train"]], ids=["specbranch", "bench", "train"])
def test_a_bare_command_shows_its_help_and_succeeds(words: list[str]) -> None:
    shown = runner.invoke(app, words)

    assert shown.exit_code == 0
    assert shown.stdout.strip() == help_of(*words).strip()


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_begins_with_a_sentence_and_ends_with_an_example(words: list[str]) -> None:
    text = help_of(*words)
    sentence = plain(text).partition(" Arguments ")[0].partition(" Options ")[0]

    assert re.search(r"[]}] ?\S* [A-Z][^.]+\.", sentence), sentence
    assert plain(text.partition("Example:")[2]).startswith(f"specbranch {' '.join(words)} ")
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_uses_the_words_of_the_field(words: list[str]) -> None:
    text = plain(help_of(*words)).lower()

    old = ("law", "submission", "gone on with", "dear", "stands", "places", "figures of", "what suits it")
    for word in (*old, "verdicts?", "bare vllm", "texts", "pays?", "longest", "most requests", "most tokens"):
        assert not re.search(rf"\b{word}\b", text), word


def test_serve_says_where_other_flags_go_and_which_port_is_used() -> None:
    text = plain(help_of("serve"))

    assert "All other flags go to `vllm serve`" in text
    assert "port 8000" in text
    assert "[default: budget]" in text and "Default: 100." in text


def test_timeline_names_the_commands_that_write_its_file() -> None:
    assert "`serve`, `generate` or `draft` with --timeline" in plain(help_of("timeline"))


@pytest.mark.parametrize("command", ["serve", "generate", "check", "simulate"])
def test_the_draft_length_has_two_names_for_one_option(command: str) -> None:
    text = plain(help_of(command))

    assert " --gamma,--num-spec" in text
    assert "Maximum draft length:" in text and "--num-speculative-tokens is the same." in text


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("serve", ["--draft-dtype", "--predictor", "--target-cores", "--draft-cores", "--timeline", "--record"]),
        ("generate", ["--draft-dtype", "--predictor", "--target-cores", "--draft-cores", "--timeline", "--vllm-arg"]),
        ("check", ["--draft-dtype", "--vllm-arg", "--num-prompts", "--num-tokens", "--num-samples"]),
        ("plan", ["--draft-dtype", "--record", "--vllm-arg", "--prompts", "--num-prompts", "--max-tokens"]),
        ("draft", ["--timeline", "--record", "--dtype"]),
    ],
)
def test_one_thing_has_one_name_in_all_commands(command: str, options: list[str]) -> None:
    text = help_of(command)

    for option in options:
        assert f" {option} " in text
    for old in ("--trace", "--draft-len", "--vllm-arguments", "--model", "--count", "--answer", "--samples"):
        if (command, old) != ("check", "--model"):  # there it is the model of a server
            assert f" {old} " not in plain(text).replace("simulate --trace", ""), old


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
