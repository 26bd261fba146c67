"""N-gram drafts: what followed the same few tokens before, in this sequence or in past answers.

A guess is put into the draft tree below a node that was not run. The draft then runs the node and all that is guessed
behind it in one step, and its distributions confirm the guess or not; or the target verifies it at once. Either way a
guess can only be right or wasted.

Drafts from the sequence itself cost no model. Summaries, answers from given sequences and edits of code copy long
stretches.

People ask the same things again, agents run in loops, and edits of one file repeat most of it. The memory is bounded:
answers that nobody looked at for longest are forgotten. It never leaves its namespace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from specbranch.core.calibration import Grounds
from specbranch.core.node import Node
from specbranch.core.tree import Tree

TEXT = "text"  # the sequence's own repetitions
MEMORY = "memory"  # past answers of the same target
SOURCES = (TEXT, MEMORY)

Guess = list[tuple[int, Grounds]]  # tokens in a row
LENGTHS = (5, 4, 3, 2)  # of the tokens that must agree, the longest tried first
_CAPACITY = 1 << 17  # tokens of all targets together; about 400 bytes each
_SHORTEST = 3  # fewer tokens that agree with another answer mean little


class NgramDrafter:
    """Guesses for one sequence. `answer` is its own part of the memory, which it does not guess from."""

    def __init__(self, tokens: list[int], memory: OutputHistory, answer: PastOutput | None = None) -> None:
        self._tokens = tokens
        self._suffixes = NgramIndex(tokens)
        self._memory = memory
        self._answer = answer

    def index_new_tokens(self, most: int = 2048) -> None:
        """Take in what the sequence has gained, at most so many tokens."""
        self._suffixes.index_new_tokens(most)

    def extend(self, tree: Tree, tip: Node, count: int, least: float, sources: Collection[str] = SOURCES) -> list[Node]:
        """Plant below a node that was not run what is guessed to follow it; the chain that is planted.

        At most `count` tokens, and none that is less likely than `least` to come true.
        """
        chain: list[Node] = []
        guess: Guess = []
        while len(chain) < count and tip.distribution is None:
            if not guess:
                guess = self._best(tree, tip, count - len(chain), sources)
            if not guess:
                break
            token, grounds = guess.pop(0)
            if tree.path_prob(tip) * tree.calibration.guess_accept_prob(grounds) < least:
                break
            tip = tree.add_guess(tip, token, grounds)
            chain.append(tip)
        return chain

    def _best(self, tree: Tree, tip: Node, count: int, sources: Collection[str]) -> Guess:
        """The guess of whoever was right most often on such grounds."""
        tail = tip.path(most=LENGTHS[0])
        found: list[Guess] = []
        if TEXT in sources:
            found.append(_repeated(TEXT, *self._suffixes.continuation(tail, count)))
        if MEMORY in sources:
            end = [*self._tokens[-LENGTHS[0] :], *tail][-LENGTHS[0] :]
            found.append(_repeated(MEMORY, *self._memory.continuation(end, count, other_than=self._answer)))
        chance = tree.calibration.guess_accept_prob
        return max(filter(None, found), key=lambda guess: chance(guess[0][1]), default=[])


def _repeated(source: str, tokens: Sequence[int], num_agreed: int) -> Guess:
    """Each guessed token that comes true is one more that agrees."""
    return [(token, (source, min(num_agreed + index, LENGTHS[0]))) for index, token in enumerate(tokens)]


class NgramIndex:
    """Positions in a sequence by the tokens before them. It follows a list that only grows, a bounded part at a time.

    Memory: one entry for each position and length.
    """

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._num_read = 1
        self._positions: dict[tuple[int, ...], int] = {}

    def index_new_tokens(self, most: int = 2048) -> None:
        """Take in what the sequence has gained, at most so many tokens; a long prompt takes several calls."""
        end = min(len(self._tokens), self._num_read + most)
        for position in range(self._num_read, end):
            for length in LENGTHS:
                if length <= position:
                    self._positions[tuple(self._tokens[position - length : position])] = position
        self._num_read = max(self._num_read, end)

    def continuation(self, tail: Sequence[int], count: int) -> tuple[list[int], int]:
        """What followed the sequence's end and `tail` last time, at most `count` tokens, and how many tokens agreed.

        Nothing, and 0, if they did not occur before.
        """
        longest = LENGTHS[0]
        end = [*self._tokens[-longest:], *tail][-longest:]
        for length in LENGTHS:
            if length <= len(end):
                position = self._positions.get(tuple(end[-length:]))
                if position is not None:
                    return self._tokens[position : position + count], length
        return [], 0


class PastOutput:
    """One answer, while it grows and afterwards. An answer that was forgotten is not remembered again."""

    __slots__ = ("is_forgotten", "is_used", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.is_used = False  # since it was last considered for forgetting
        self.is_forgotten = False


class HistoryBudget:
    """What all memories together may hold. The largest and the longest idle forgets first: its size times its rest."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._num_tokens = 0
        self._now = 0
        self._last: dict[OutputHistory, int] = {}  # when it grew last

    def take(self, memory: OutputHistory, num_tokens: int) -> None:
        """A memory has grown by so many tokens."""
        self._now += 1
        self._last[memory] = self._now
        self._num_tokens += num_tokens
        while self._num_tokens > self._capacity:
            fullest = max(self._last, key=lambda one: one.num_tokens * (1 + self._now - self._last[one]))
            self._num_tokens -= fullest.forget_oldest()
            if not fullest.num_tokens:
                del self._last[fullest]


class OutputHistory:
    """Positions in answers by the tokens before them. Read by one thread while another writes: each change is whole."""

    def __init__(self, room: HistoryBudget | None = None) -> None:
        self._room = room or HistoryBudget()
        self._answers: deque[PastOutput] = deque()
        self._positions: dict[tuple[int, ...], tuple[PastOutput, int]] = {}
        self.num_tokens = 0

    def begin(self) -> PastOutput:
        """A new answer, to be passed to `add`; it is remembered from its first token on."""
        return PastOutput()

    def add(self, answer: PastOutput, tokens: Sequence[int]) -> None:
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

    def continuation(
        self, tail: Sequence[int], count: int, other_than: PastOutput | None = None
    ) -> tuple[list[int], int]:
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

    def _forget(self, answer: PastOutput) -> int:
        answer.is_forgotten = True
        tokens = answer.tokens
        for position in range(len(tokens)):
            for length in LENGTHS:
                key = tuple(tokens[position - length : position]) if _SHORTEST <= length <= position else None
                if key is not None and self._positions.get(key, (None, 0))[0] is answer:
                    del self._positions[key]
        self.num_tokens -= len(tokens)
        return len(tokens)
