"""Which characters of an answer were drafted. The text is the engine's own; only its colour is decided here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_BROKEN = "\ufffd"  # what a decoder shows for a character that is not complete yet


@dataclass(frozen=True, slots=True)
class Run:
    """A piece of text that was either drafted or not."""

    text: str
    is_drafted: bool


class Painter:
    """Splits the text of one answer into runs. `decode` turns token ids into text.

    Tokens are decoded one by one, in the context of those before, to count the characters of each. A character of
    several tokens counts for the token that completes it. If the engine's text differs from the decoder's, colours may
    be off by some characters; the text never is.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []  # the last complete tokens and those that are not complete yet
        self._num_complete = 0
        self._owed: deque[bool] = deque()  # whether each character was drafted that the engine has not sent yet

    def paint(self, tokens: Sequence[int], text: str) -> list[Run]:
        """The engine's next text as runs; all new tokens but the last were drafted."""
        for index, token in enumerate(tokens):
            self._owed.extend([index < len(tokens) - 1] * self._num_new_characters(token))
        runs: list[Run] = []
        for character in text:
            is_drafted = self._owed.popleft() if self._owed else False
            if runs and runs[-1].is_drafted == is_drafted:
                runs[-1] = Run(runs[-1].text + character, is_drafted)
            else:
                runs.append(Run(character, is_drafted))
        return runs

    def _num_new_characters(self, token: int) -> int:
        self._window.append(token)
        before = self._decode(self._window[: self._num_complete])
        after = self._decode(self._window)
        if after.endswith(_BROKEN):
            return 0
        # What was just completed is the context of what comes next.
        self._window = self._window[self._num_complete :]
        self._num_complete = len(self._window)
        return max(0, len(after) - len(before))
