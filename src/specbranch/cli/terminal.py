"""Show an answer on the terminal: chat, colors for drafted text, and a line of stats."""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TextIO

from specbranch.launch.vllm_engine import StepOutput

Message = dict[str, str]
COMMANDS = "/quit leaves the chat, /clear clears the history, Ctrl-C stops an answer."
_BROKEN = "\ufffd"  # the decoder's symbol for an incomplete character
_GREEN, _DIM, _PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"
_SAVE, _RESTORE, _CLEAR = "\x1b7", "\x1b8", "\x1b[2K"
_EVERY_S = 0.1


class Chat:
    """A chat: `read` returns the user's next line, or None at the end; `answer` maps the history to the answer's text.

    If `answer` returns None, it rejected the question, which is then dropped from the history. `tell` shows a notice.
    `system` is the system message, with which every history begins.
    """

    def __init__(
        self,
        read: Callable[[], str | None],
        answer: Callable[[Sequence[Message]], str | None],
        tell: Callable[[str], None],
        system: str | None = None,
    ) -> None:
        self._read = read
        self._answer = answer
        self._tell = tell
        self._start: list[Message] = [{"role": "system", "content": system}] if system else []
        self.history: list[Message] = list(self._start)

    def run(self) -> None:
        """Read and answer lines until the user leaves."""
        while (line := self._read()) is not None:
            said = line.strip()
            if said == "/quit":
                return
            if said == "/clear":
                self.history = list(self._start)
                self._tell("History cleared.")
            elif said.startswith("/"):
                self._tell(COMMANDS)
            elif said:
                self._say(said)

    def _say(self, said: str) -> None:
        self.history.append({"role": "user", "content": said})
        text = self._answer(self.history)
        if text is None:
            self.history.pop()
        else:
            self.history.append({"role": "assistant", "content": text})


@dataclass(frozen=True, slots=True)
class TextRun:
    """A piece of an answer's text: from accepted draft tokens (`is_drafted`), or from the target's own tokens."""

    text: str
    is_drafted: bool


class DraftHighlighter:
    """Splits the text of one answer into runs that were drafted and runs that were not.

    `decode` turns token ids into text. Tokens are decoded one by one, in the context of the tokens before, to count the
    characters of each. A character that several tokens encode counts for the token that completes it. If the engine's
    text differs from the decoder's, colors may be some characters off; the text never is.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []  # the last complete tokens, then the incomplete ones
        self._num_complete = 0
        self._owed: deque[bool] = deque()  # for each character still to come from the engine: whether it was drafted

    def split(self, tokens: Sequence[int], text: str) -> list[TextRun]:
        """Return the engine's next piece of text as runs; all new tokens except the last were drafted."""
        for index, token in enumerate(tokens):
            self._owed.extend([index < len(tokens) - 1] * self._num_new_characters(token))
        runs: list[TextRun] = []
        for character in text:
            is_drafted = self._owed.popleft() if self._owed else False
            if runs and runs[-1].is_drafted == is_drafted:
                runs[-1] = TextRun(runs[-1].text + character, is_drafted)
            else:
                runs.append(TextRun(character, is_drafted))
        return runs

    def _num_new_characters(self, token: int) -> int:
        self._window.append(token)
        before = self._decode(self._window[: self._num_complete])
        after = self._decode(self._window)
        if after.endswith(_BROKEN):
            return 0
        # The tokens just completed are the context of the next tokens.
        self._window = self._window[self._num_complete :]
        self._num_complete = len(self._window)
        return max(0, len(after) - len(before))


# A model may emit terminal escape sequences, so control characters are removed.
_HARMLESS = {code: None for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}


class TerminalView:
    """A context manager that writes runs of text, drafted ones in green, with stats in the terminal's last line."""

    def __init__(
        self,
        file: TextIO,
        is_terminal: bool,
        has_colors: bool,
        clock: Callable[[], float] = time.monotonic,
        size: Callable[[], tuple[int, int]] = shutil.get_terminal_size,
    ) -> None:
        self._file = file
        self._is_terminal = is_terminal
        self._has_colors = has_colors
        self._clock = clock
        self._size = size
        self._shown: tuple[int, int] | None = None  # the terminal size when the last line was reserved
        self._drawn_s = -1.0

    def write(self, runs: Iterable[TextRun]) -> None:
        """Write runs of text to the output."""
        for run in runs:
            text = run.text.translate(_HARMLESS) if self._is_terminal else run.text
            is_green = self._has_colors and run.is_drafted
            self._file.write(f"{_GREEN}{text}{_PLAIN}" if is_green else text)
        self._file.flush()

    def show_stats(self, stats: str) -> None:
        """Show `stats` in the terminal's last line, at most ten times a second; do nothing without a terminal."""
        if self._shown is None or self._clock() - self._drawn_s < _EVERY_S:
            return
        self._drawn_s = self._clock()
        if self._size() != self._shown:
            self._reserve_last_line()
        columns, lines = self._shown
        line = f"{_DIM}{stats[: columns - 1]}{_PLAIN}" if self._has_colors else stats[: columns - 1]
        self._file.write(f"{_SAVE}\x1b[{lines};1H{_CLEAR}{line}{_RESTORE}")
        self._file.flush()

    def __enter__(self) -> TerminalView:
        if self._is_terminal:
            # Move up one line if the cursor is on the last one.
            self._file.write("\n\x1b[A")
            self._reserve_last_line()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown is not None:
            self._file.write(f"{_SAVE}\x1b[{self._shown[1]};1H{_CLEAR}\x1b[r{_RESTORE}")
            self._file.flush()
            self._shown = None

    def _reserve_last_line(self) -> None:
        self._shown = self._size()
        # Setting the scroll region moves the cursor, so restore it.
        self._file.write(f"{_SAVE}\x1b[1;{max(1, self._shown[1] - 1)}r{_RESTORE}")


@dataclass(slots=True)
class StreamedAnswer:
    """An answer that arrives in pieces. The first piece ends the prefill; each later piece is from one round.

    A round is one step of the target, which accepts some draft tokens, perhaps none, and adds a token of its own.
    """

    asked_s: float
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    rounds: int = 0
    accepted: int = 0
    wait_s: float = 0.0
    finish_reason: str | None = None
    is_stopped: bool = False  # by the user
    pieces: list[tuple[float, list[TextRun]]] = field(default_factory=list)  # seconds since the request, and text
    _first_s: float | None = None
    _last_s: float | None = None
    _num_first: int = 0

    def take(self, piece: StepOutput, runs: list[TextRun]) -> None:
        """Add the output of one engine step to the answer, without showing it; `runs` is the text of this output."""
        self.pieces.append((piece.at_s - self.asked_s, runs))
        self.text += piece.text
        self.tokens += piece.tokens
        self.finish_reason = piece.finish_reason
        self._last_s = piece.at_s
        if self._first_s is None:
            self._first_s, self._num_first = piece.at_s, len(piece.tokens)
        elif piece.tokens:
            self.rounds += 1
            self.accepted += len(piece.tokens) - 1

    @property
    def decode_s(self) -> float:
        """Seconds from the first piece to the last; 0 before the first."""
        return self._last_s - self._first_s if self._first_s is not None and self._last_s is not None else 0.0

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the request to the first token; None before it has arrived."""
        return self._first_s - self.asked_s if self._first_s is not None else None

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second after the first piece, so without the prefill; 0 before a second piece."""
        return (len(self.tokens) - self._num_first) / self.decode_s if self.decode_s else 0.0

    @property
    def accepted_per_round(self) -> float:
        """Mean number of accepted draft tokens per round, that is, per step of the target; 0 before the first."""
        return self.accepted / self.rounds if self.rounds else 0.0

    @property
    def wait_share(self) -> float:
        """The share of the decoding time in which the target waited for drafts; 0 before `wait_s` is set."""
        return min(1.0, self.wait_s / self.decode_s) if self.decode_s else 0.0

    def stats(self) -> str:
        """Return one line of text: the answer's length and speed, accepted draft tokens, and the wait for drafts."""
        parts = [f"{len(self.tokens)} tokens", f"{self.tokens_per_s:.1f} tokens/s"]
        if self.first_token_s is not None:
            parts.append(f"first token after {self.first_token_s:.2f} s")
        if self.accepted or self.wait_s:
            parts.append(f"{self.accepted_per_round:.2f} draft tokens accepted per round")
        if self.wait_s:  # only set at the end
            parts.append(f"waited {self.wait_share:.0%}")
        return " · ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """Return the text, tokens, stats and timed pieces of the answer as a JSON dict."""
        names = ("text", "tokens", "tokens_per_s", "first_token_s", "rounds", "accepted", "accepted_per_round")
        pieces = [
            {"at_s": round(at_s, 4), "runs": [[run.text, run.is_drafted] for run in runs]} for at_s, runs in self.pieces
        ]
        return {**{name: getattr(self, name) for name in (*names, "wait_s", "finish_reason")}, "pieces": pieces}
