"""The parts of `specbranch generate` that need no model: colours, the screen, the chat, the stats, wrong options."""

from __future__ import annotations

import codecs
import io
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from specbranch.cli import app
from specbranch.cli.console import CtrlCGuard
from specbranch.cli.terminal import Chat, DraftHighlighter, Message, StreamedAnswer, TerminalView, TextRun
from specbranch.launch.vllm_engine import StepOutput

runner = CliRunner()


def decode(tokens: Sequence[int]) -> str:
    """A tokenizer whose tokens are bytes."""
    return bytes(tokens).decode(errors="replace")


def test_all_but_the_last_token_of_a_piece_were_drafted() -> None:
    runs = DraftHighlighter(decode).split(b"foxes", "foxes")

    assert runs == [TextRun("foxe", True), TextRun("s", False)]


def test_a_character_of_several_tokens_has_the_colour_of_the_one_that_completes_it() -> None:
    painter = DraftHighlighter(decode)
    first, second, third, fourth = "é".encode() + "ß".encode()

    assert painter.split([first], "") == []
    assert painter.split([second, third], "é") == [TextRun("é", True)]
    assert painter.split([fourth], "ß") == [TextRun("ß", False)]


def test_text_that_the_engine_holds_back_keeps_its_colours() -> None:
    """An engine with stop strings sends some characters later."""
    painter = DraftHighlighter(decode)

    assert painter.split(b"abc", "a") == [TextRun("a", True)]
    assert painter.split(b"d", "bcd") == [TextRun("b", True), TextRun("cd", False)]


@given(st.text(max_size=30), st.lists(st.integers(1, 5), min_size=1))
def test_whatever_the_pieces_the_text_is_the_engines(text: str, lengths: list[int]) -> None:
    painter, engine = DraftHighlighter(decode), codecs.getincrementaldecoder("utf-8")()
    rest, shown = text.encode(errors="ignore"), ""
    while rest:
        for length in lengths:
            piece, rest = rest[:length], rest[length:]
            shown += "".join(run.text for run in painter.split(piece, engine.decode(piece)))

    assert shown == text.encode(errors="ignore").decode()


def test_a_text_other_than_the_decoders_is_shown_all_the_same() -> None:
    runs = DraftHighlighter(decode).split(b"ab", "something else")

    assert "".join(run.text for run in runs) == "something else"


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_without_a_terminal_there_is_the_text_and_nothing_else() -> None:
    file = io.StringIO()
    with TerminalView(file, is_terminal=False, has_colors=False) as screen:
        screen.write([TextRun("a\x1b", True), TextRun("b\n", False)])
        screen.show_stats("3 tokens")

    assert file.getvalue() == "a\x1bb\n"


def test_on_a_terminal_drafted_text_is_green_and_no_command_of_the_model_gets_through() -> None:
    file = io.StringIO()
    TerminalView(file, is_terminal=True, has_colors=True).write(
        [TextRun("a\x1b[2J\x9b", True), TextRun("b\t\n", False)]
    )

    assert file.getvalue() == "\x1b[32ma[2J\x1b[0mb\t\n"


def test_the_stats_are_on_the_last_line_which_is_given_back() -> None:
    file, clock = io.StringIO(), Clock()
    with TerminalView(file, True, False, clock, size=lambda: (20, 10)) as screen:
        assert "\x1b[1;9r" in file.getvalue()
        screen.show_stats("a line that is much longer than that")
        assert file.getvalue().endswith("\x1b7\x1b[10;1H\x1b[2Ka line that is much\x1b8")
        before = file.getvalue()
        screen.show_stats("too soon")
        assert file.getvalue() == before
        clock.now_s += 0.2
        screen.show_stats("now")
        assert "now" in file.getvalue()

    assert file.getvalue().endswith("\x1b[10;1H\x1b[2K\x1b[r\x1b8")


def test_a_terminal_that_changed_its_size_has_its_last_line_elsewhere() -> None:
    file, clock, sizes = io.StringIO(), Clock(), [(80, 30)]
    with TerminalView(file, True, False, clock, size=lambda: sizes[0]) as screen:
        sizes[0] = (80, 20)
        screen.show_stats("here")

    assert "\x1b[1;19r" in file.getvalue() and "\x1b[20;1H\x1b[2Khere" in file.getvalue()


def test_the_speed_is_that_of_decoding_and_the_first_piece_is_no_round() -> None:
    answer = StreamedAnswer(asked_s=0.0)
    for at_s, tokens in ((1.0, [1]), (1.5, [2, 3, 4]), (2.0, [5])):
        text = "x" * len(tokens)
        piece = StepOutput(index=0, tokens=tokens, text=text, finish_reason=None, at_s=at_s)
        answer.take(piece, [TextRun(text[:-1], True), TextRun("x", False)])
    answer.wait_s = 0.25

    assert (answer.tokens, answer.text, answer.rounds, answer.accepted) == ([1, 2, 3, 4, 5], "xxxxx", 2, 2)
    assert (answer.tokens_per_s, answer.first_token_s, answer.wait_share) == (4.0, 1.0, 0.25)
    assert answer.as_json()["pieces"][1] == {"at_s": 1.5, "runs": [["xx", True], ["x", False]]}
    assert answer.stats() == (
        "5 tokens · 4.0 tokens/s · first token after 1.00 s · 1.00 draft tokens accepted per round · waited 25%"
    )


def test_an_answer_of_nothing_has_stats() -> None:
    assert StreamedAnswer(0.0).stats() == "0 tokens · 0.0 tokens/s"
    assert StreamedAnswer(0.0).as_json()["first_token_s"] is None


def chat_with(*lines: str, can_answer: bool = True) -> tuple[Chat, list[list[Message]], list[str]]:
    """A chat after these lines, what the target was asked, and what the user was told."""
    asked: list[list[Message]] = []
    told: list[str] = []
    waiting = list(lines)

    def answer(history: Sequence[Message]) -> str | None:
        asked.append(list(history))
        return f"answer {len(asked)}" if can_answer else None

    chat = Chat(lambda: waiting.pop(0) if waiting else None, answer, told.append, system="be brief")
    chat.run()
    return chat, asked, told


def test_a_chat_keeps_its_history() -> None:
    _, asked, _ = chat_with("hello\n", "  \n", "more\n", "/quit\n", "never\n")

    assert [message["content"] for message in asked[-1]] == ["be brief", "hello", "answer 1", "more"]
    assert len(asked) == 2


def test_a_cleared_chat_starts_with_the_system_message_only() -> None:
    _, asked, told = chat_with("hello", "/clear", "again")

    assert [message["content"] for message in asked[-1]] == ["be brief", "again"]
    assert told == ["History cleared."]


def test_a_question_that_cannot_be_taken_is_forgotten_and_a_wrong_command_explained() -> None:
    chat, _, told = chat_with("too long", "/help", can_answer=False)

    assert len(chat.history) == 1
    assert "/quit leaves" in told[0]


def test_the_first_ctrl_c_is_noted_and_the_second_obeyed() -> None:
    before = signal.getsignal(signal.SIGINT)
    with CtrlCGuard() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.is_asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    assert signal.getsignal(signal.SIGINT) is before


NOISY = """
import os, sys, time, warnings
from pathlib import Path
from specbranch.cli.console import redirect_output
with redirect_output(Path(sys.argv[1]), "loading"):
    print("printed")
    warnings.warn("warned")
    os.write(1, b"written to one")
    os.write(2, b"written to two")
    time.sleep(0.3)
print("afterwards")
"""


def test_on_a_terminal_a_spinner_turns_and_what_libraries_say_goes_to_the_file(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", NOISY, str(tmp_path / "log")]
    environment = {**os.environ, "TERM": "xterm"}
    done = subprocess.run(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, check=False)
    seen, log = os.read(ours, 65536).decode(), (tmp_path / "log").read_text()
    os.close(ours)
    os.close(theirs)

    assert done.returncode == 0, seen
    assert "loading" in seen and "afterwards" in seen
    for noise in ("printed", "warned", "written to one", "written to two"):
        assert noise in log and noise not in seen


def test_without_a_terminal_loading_is_one_plain_line(tmp_path: Path) -> None:
    command = [sys.executable, "-c", NOISY, str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert done.stderr == "specbranch: loading\n"
    assert done.stdout == "afterwards\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draft", "d", "--draft-address", "ipc://x"], "give only one of"),
        (["--planner", "pearl", "--prompt", "x"], "planner 'pearl' with these settings makes none; name a draft"),
        (["--prompt", "x", "--timeline", "t"], "and there is none; name a --draft"),
        (["--draft-address", "ipc:///tmp/x", "--prompt", "x", "--timeline", "t"], "give it to `specbranch draft`"),
        (["--bare", "--compare", "--prompt", "x"], "--bare has no drafts"),
        (["--bare", "--chat", "--json"], "a chat does not go with"),
        (["--draft", "d", "--prompt", "x", "--set", "gamma"], "give KEY=VALUE"),
        (["--draft", "d", "--prompt", "x", "--timeline", "/no/such/place/t.json"], "there is no directory"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_loaded(arguments: list[str], message: str) -> None:
    done = runner.invoke(app, ["generate", "some-model", *arguments])

    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
