"""A chat in the terminal: reads lines, prints answers, keeps the history."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Message = dict[str, str]
COMMANDS = "/quit leaves the chat, /clear clears the history, Ctrl-C stops an answer."


class Chat:
    """Reads lines until `read` returns None or `/quit`. `answer` gets the history and returns the answer's text.

    `answer` may return None for a question that it cannot take; the question is then dropped.
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
        """Chat until the user leaves."""
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
