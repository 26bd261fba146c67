"""Past answers of one target: what followed the same few tokens in another answer.

People ask the same things again, agents run in loops, and edits of one file repeat most of it. The memory is bounded:
answers that nobody looked at for longest are forgotten. It never leaves its namespace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from specbranch.core.suffix import LENGTHS

_CAPACITY = 1 << 17  # tokens of all targets together; about 400 bytes each
_SHORTEST = 3  # fewer tokens that agree with another answer mean little


class Answer:
    """One answer, while it grows and afterwards. An answer that was forgotten is not remembered again."""

    __slots__ = ("is_forgotten", "is_used", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.is_used = False  # since it was last considered for forgetting
        self.is_forgotten = False


class Room:
    """What all memories together may hold. The largest and the longest idle forgets first: its size times its rest."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._num_tokens = 0
        self._now = 0
        self._last: dict[AnswerMemory, int] = {}  # when it grew last

    def take(self, memory: AnswerMemory, num_tokens: int) -> None:
        """A memory has grown by so many tokens."""
        self._now += 1
        self._last[memory] = self._now
        self._num_tokens += num_tokens
        while self._num_tokens > self._capacity:
            fullest = max(self._last, key=lambda one: one.num_tokens * (1 + self._now - self._last[one]))
            self._num_tokens -= fullest.forget_oldest()
            if not fullest.num_tokens:
                del self._last[fullest]


class AnswerMemory:
    """Positions in answers by the tokens before them. Read by one thread while another writes: each change is whole."""

    def __init__(self, room: Room | None = None) -> None:
        self._room = room or Room()
        self._answers: deque[Answer] = deque()
        self._positions: dict[tuple[int, ...], tuple[Answer, int]] = {}
        self.num_tokens = 0

    def begin(self) -> Answer:
        """A new answer, to be passed to `add`; it is remembered from its first token on."""
        return Answer()

    def add(self, answer: Answer, tokens: Sequence[int]) -> None:
        """Take in the next tokens of an answer."""
        if answer.is_forgotten or not tokens:
            return
        kept = answer.tokens
        if not kept:
            self._answers.append(answer)
        for token in tokens:
            for length in LENGTHS:
                if _SHORTEST <= length <= len(kept):
                    self._positions[tuple(kept[-length:])] = (answer, len(kept))
            kept.append(token)
        self.num_tokens += len(tokens)
        self._room.take(self, len(tokens))

    def after(self, tail: Sequence[int], count: int, other_than: Answer | None = None) -> tuple[list[int], int]:
        """What followed the last tokens of `tail` in an answer, at most `count` tokens, and how many tokens agreed.

        Nothing, and 0, if they occurred in no answer, or only in `other_than`.
        """
        for length in LENGTHS:
            if _SHORTEST <= length <= len(tail):
                found = self._positions.get(tuple(tail[-length:]))
                if found is not None and found[0] is not other_than:
                    answer, position = found
                    answer.is_used = True
                    return answer.tokens[position : position + count], length
        return [], 0

    def forget_oldest(self) -> int:
        """Forget the oldest answer; how many tokens that were. One that was of use lately is spared once."""
        answer = self._answers.popleft()
        if answer.is_used:
            answer.is_used = False
            self._answers.append(answer)
            return 0
        return self._forget(answer)

    def _forget(self, answer: Answer) -> int:
        answer.is_forgotten = True
        tokens = answer.tokens
        for position in range(len(tokens)):
            for length in LENGTHS:
                key = tuple(tokens[position - length : position]) if _SHORTEST <= length <= position else None
                if key is not None and self._positions.get(key, (None, 0))[0] is answer:
                    del self._positions[key]
        self.num_tokens -= len(tokens)
        return len(tokens)
