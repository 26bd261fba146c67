"""N-gram drafts: what followed the same few tokens before, in this sequence or in past answers.

A guess is a token of such a draft. It is added to the draft tree below a node whose next-token distribution the draft
model has not computed. The draft model then computes the distributions after this node and after the guesses below it
in one step, which confirm the guesses or not; or the target verifies the guesses at once. Either way a wrong guess only
wastes time.

Guesses from the sequence itself need no model. They help where text is copied: in summaries, in answers about a given
text, in edits of code.

Past answers are kept too, because repeated questions, agents in loops and edits of one file repeat most of an answer.
Their number of tokens is limited: the oldest answers are evicted first, but answers in which a context was found stay
longer. The service keeps a separate history for each namespace, so guesses never come from another namespace.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Sequence

import numpy as np

from specbranch.core.calibration import Grounds
from specbranch.core.node import Node
from specbranch.core.tree import Tree

TEXT = "text"  # the sequence's own repetitions
MEMORY = "memory"  # past answers of the same target
SOURCES = (TEXT, MEMORY)

Guess = list[tuple[int, Grounds]]  # consecutive tokens, each with its grounds
MIN_MATCH, MAX_MATCH = 2, 16  # tokens of a context that must match, and that are compared: longer matches are better
_MAX_NEWEST = 2048  # tokens to index right before a guess; an answer to the target may wait for this
# Guesses are judged together by the length of their match: each class begins at one of these lengths.
_CLASSES = (2, 3, 4, 5, 6, 9, 16)
_CLASS_OF = tuple(max((first for first in _CLASSES if first <= length), default=2) for length in range(MAX_MATCH + 1))
# Positions are found by the three tokens before them, for longer matches too, or else by the two before them.
_CHAINED = ((3, MAX_MATCH), (MIN_MATCH, MIN_MATCH))
_MAX_CANDIDATES = 32  # positions to compare with a context
_MAX_LOAD = 4  # positions for each entry of the table of hashes
_MIN_VECTORISED = 64  # new positions from which NumPy is faster than a loop
_HASH_BITS, _MASK, _MIXER = 32, 0xFFFFFFFF, 0x9E3779B1
_CAPACITY = 1 << 17  # tokens of all targets together; about 400 bytes each
LENGTHS = (5, 4, 3)  # contexts in past answers that are indexed; a shorter match means little there


class NgramDrafter:
    """Drafts the next tokens of one sequence by n-gram lookup in the sequence itself and in past answers.

    `tokens` is the growing list of the sequence's tokens. `history` holds past answers; `answer` is the sequence's own
    answer among these, from which nothing is guessed.
    """

    def __init__(self, tokens: list[int], history: OutputHistory, answer: PastOutput | None = None) -> None:
        self._index = NgramIndex(tokens)
        self._tokens = tokens
        self._history = history
        self._answer = answer

    def index_new_tokens(self) -> None:
        """Add tokens of the sequence that are not indexed yet to the index, at most 8192 in each call."""
        self._index.index_new_tokens()

    def extend(
        self, tree: Tree, tip: Node, count: int, min_prob: float, sources: Collection[str] = SOURCES
    ) -> list[Node]:
        """Add at most `count` guessed nodes as a chain below `tip`, and return these nodes.

        Return none if the draft model has computed the distribution after `tip`. The chain ends before a guess that the
        target reaches from the root with a probability below `min_prob`. `sources`: where guesses may come from,
        `TEXT`, `MEMORY` or both.
        """
        if TEXT in sources and self._index.num_indexed < len(self._tokens):
            self._index.index_new_tokens(_MAX_NEWEST)
        chain: list[Node] = []
        guess: Guess = []
        while len(chain) < count and tip.distribution is None:
            if not guess:
                guess = self._best_guess(tree, tip, count - len(chain), sources)
            if not guess:
                break
            token, grounds = guess.pop(0)
            if tree.path_prob(tip) * tree.trust.accept_prob(grounds, tree.calibration) < min_prob:
                break
            tip = tree.add_guess(tip, token, grounds)
            chain.append(tip)
        return chain

    def _best_guess(self, tree: Tree, tip: Node, count: int, sources: Collection[str]) -> Guess:
        """Return a guess of at most `count` tokens after `tip`; an empty list if no source has one.

        If several sources have a guess, take that of the source that was right most often, each source judged by its
        past guesses with the same matched context length.
        """
        tail = tip.path(max_len=MAX_MATCH)
        found: list[tuple[str, Sequence[int], int]] = []
        if TEXT in sources:
            found.append((TEXT, *self._index.continuation(tail, count)))
        if MEMORY in sources:
            end = [*self._tokens[-MAX_MATCH:], *tail][-MAX_MATCH:]
            found.append((MEMORY, *self._history.continuation(end, count, other_than=self._answer)))
        best: Guess = []
        best_prob = 0.0
        for source, tokens, num_agreed in found:
            if (
                tokens
                and (prob := tree.trust.accept_prob((source, _CLASS_OF[num_agreed]), tree.calibration)) > best_prob
            ):
                # A guessed token that comes true makes the matched context of the next one longer.
                lengths = (min(num_agreed + index, MAX_MATCH) for index in range(len(tokens)))
                best = [(token, (source, _CLASS_OF[length])) for token, length in zip(tokens, lengths, strict=True)]
                best_prob = prob
        return best


class NgramIndex:
    """Finds where the last few tokens of a sequence occurred before in it.

    `tokens` is a list that only grows; `index_new_tokens` indexes a bounded number of its tokens per call. A lookup
    compares the context with the newest 32 positions after the same three tokens; if none match, it looks for the last
    two tokens. Memory: about 12 to 16 bytes for each token.
    """

    def __init__(self, tokens: list[int]) -> None:
        self.num_indexed = 1
        self._tokens = tokens
        self._chains = [_PositionChains(length, longest) for length, longest in _CHAINED]

    def index_new_tokens(self, max_tokens: int = 8192) -> None:
        """Index the new tokens of the sequence, at most `max_tokens`; a very long prompt takes several calls."""
        end = min(len(self._tokens), self.num_indexed + max_tokens)
        if end > self.num_indexed:
            for chains in self._chains:
                chains.extend(self._tokens, end)
            self.num_indexed = end

    def continuation(self, tail: Sequence[int], count: int) -> tuple[list[int], int]:
        """Return the tokens after the last earlier occurrence of the context, and how many tokens of it matched.

        The context is the end of the sequence and then `tail`; its longest indexed match is used. Return at most
        `count` tokens; an empty list and 0 if nothing matches.
        """
        context = [*self._tokens[-MAX_MATCH:], *tail][-MAX_MATCH:]
        for chains in self._chains:
            position, length = chains.find(self._tokens, context)
            if length:
                return self._tokens[position : position + count], length
        return [], 0


class _PositionChains:
    """The positions of a sequence, chained by a hash of the `length` tokens before each, the newest position first.

    Matches of `length` to `longest` tokens are found. Contexts with the same hash share a chain, which costs time and
    gives no wrong match, because the tokens are compared too.
    """

    def __init__(self, length: int, longest: int) -> None:
        self._length, self._longest = length, longest
        self._shift = _HASH_BITS
        self._newest = array("i", [0])  # by hash, the newest position; 0 is none, since no tokens come before it
        self._previous = array("i", [0])  # by position, the next older one of the same hash

    def extend(self, tokens: Sequence[int], end: int) -> None:
        """Add the positions up to `end`, without it, that are not in the chains yet."""
        if end > _MAX_LOAD * len(self._newest):
            self._clear(end)
        begin = len(self._previous)
        if end - begin >= _MIN_VECTORISED:
            self._add_many(tokens, begin, end)
            return
        newest, previous, length = self._newest, self._previous, self._length
        for position in range(begin, end):
            older = 0
            if position >= length:
                place = self._hash(tokens[position - length : position])
                older, newest[place] = newest[place], position
            previous.append(older)

    def find(self, tokens: Sequence[int], context: Sequence[int]) -> tuple[int, int]:
        """Return the position after the longest match of the end of `context`, and the match's length.

        Of equally long matches the newest is returned; (0, 0) if there is none.
        """
        best = self._length - 1
        if len(context) <= best:
            return 0, 0
        mixed = 0
        for token in context[-self._length :]:  # as in `_hash`; a call would cost as much again
            mixed = (mixed + token) * _MIXER & _MASK
        position = self._newest[mixed >> self._shift]
        if position <= best:
            return 0, 0
        best_position = 0
        context = context[-self._longest :]
        longest, previous, wanted = len(context), self._previous, context[-self._length]
        for _ in range(_MAX_CANDIDATES):
            if position <= best:  # too few tokens come before it
                break
            # This one token shows of most candidates that they are no better.
            if tokens[position - best - 1] == wanted and (length := _num_equal(tokens, position, context)) > best:
                best, best_position = length, position
                if length == longest:
                    break
                wanted = context[-best - 1]
            position = previous[position]
        return (best_position, best) if best_position else (0, 0)

    def _hash(self, context: Sequence[int]) -> int:
        mixed = 0
        for token in context:
            mixed = (mixed + token) * _MIXER & _MASK
        return mixed >> self._shift

    def _clear(self, num_positions: int) -> None:
        """Remove all positions, and replace the table of hashes by one for at least twice `num_positions` positions."""
        bits = (num_positions - 1).bit_length() - 1
        self._shift = _HASH_BITS - bits
        self._newest = array("i", bytes(4 << bits))
        self._previous = array("i", [0])

    def _add_many(self, tokens: Sequence[int], begin: int, end: int) -> None:
        """Add the positions from `begin` to `end`, without it, by sorting their hashes."""
        length = self._length
        first = max(begin, length)
        self._previous.extend([0] * (first - begin))
        window = np.array(array("i", tokens[first - length : end - 1])).view(np.uint32)
        num = end - first
        mixed = np.zeros(num, dtype=np.uint32)
        for index in range(length):
            mixed += window[index : index + num]
            mixed *= np.uint32(_MIXER)
        # One number holds hash and position, so a plain sort keeps the order of positions with the same hash.
        keys = (mixed >> np.uint32(self._shift)).astype(np.int64) << _HASH_BITS
        keys += np.arange(first, end)
        keys.sort()
        places, positions = keys >> _HASH_BITS, keys.astype(np.int32)
        newest = np.frombuffer(self._newest, dtype=np.int32)
        is_first = np.append(True, places[1:] != places[:-1])
        older = np.where(is_first, newest[places], np.append(np.int32(0), positions[:-1]))
        newest[places] = positions  # of the same place the last remains
        previous = np.empty(num, dtype=np.int32)
        previous[positions - first] = older
        self._previous.frombytes(previous.tobytes())


def _num_equal(tokens: Sequence[int], position: int, context: Sequence[int]) -> int:
    """Return how many tokens before `position` equal the end of `context`."""
    num = 0
    for token in reversed(context[-position:]):
        if tokens[position - 1 - num] != token:
            break
        num += 1
    return num


class PastOutput:
    """One answer in an `OutputHistory`, growing or complete; once evicted (`is_forgotten`), it takes no more tokens."""

    __slots__ = ("is_forgotten", "is_used", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.is_used = False  # whether it was guessed from since it was last considered for forgetting
        self.is_forgotten = False


class HistoryBudget:
    """A limit on the number of tokens that several histories hold together.

    While it is exceeded, answers are evicted from the history with the largest product of size and idle time.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._num_tokens = 0
        self._now = 0
        self._last: dict[OutputHistory, int] = {}  # when each history grew last

    def take(self, history: OutputHistory, num_tokens: int) -> None:
        """Add `num_tokens` new tokens of `history` to the total; while the total exceeds the limit, evict answers."""
        self._now += 1
        self._last[history] = self._now
        self._num_tokens += num_tokens
        while self._num_tokens > self._capacity:
            fullest = max(self._last, key=lambda one: one.num_tokens * (1 + self._now - self._last[one]))
            self._num_tokens -= fullest.forget_oldest()
            if not fullest.num_tokens:
                del self._last[fullest]


class OutputHistory:
    """Keeps past answers, and finds the tokens that followed a context in one of them.

    `room` is the limit on the number of tokens kept; several histories may share it. One thread may call
    `continuation` while another adds tokens: each change is atomic.
    """

    def __init__(self, room: HistoryBudget | None = None) -> None:
        self._room = room or HistoryBudget()
        self._answers: deque[PastOutput] = deque()
        self._positions: dict[tuple[int, ...], tuple[PastOutput, int]] = {}
        self.num_tokens = 0

    def begin(self) -> PastOutput:
        """Return a new, empty answer to pass to `add`; it joins the history when it gets its first token."""
        return PastOutput()

    def add(self, answer: PastOutput, tokens: Sequence[int]) -> None:
        """Append tokens to an answer and index them; do nothing if the answer was evicted.

        If the histories that share the limit then hold too many tokens, old answers are evicted.
        """
        if answer.is_forgotten or not tokens:
            return
        kept = answer.tokens
        if not kept:
            self._answers.append(answer)
        for token in tokens:
            for length in LENGTHS:
                if length <= len(kept):
                    self._positions[tuple(kept[-length:])] = (answer, len(kept))
            kept.append(token)
        self.num_tokens += len(tokens)
        self._room.take(self, len(tokens))

    def continuation(
        self, tail: Sequence[int], count: int, other_than: PastOutput | None = None
    ) -> tuple[list[int], int]:
        """Return the tokens that followed the end of `tail` in a past answer, and how many tokens of `tail` matched.

        Of the contexts of five tokens, or else four or three, the last occurrence is used, and its answer is marked as
        used; if that answer is `other_than`, a shorter context is tried. Tokens before the context may match too.
        Return at most `count` tokens; an empty list and 0 if nothing matches.
        """
        for length in LENGTHS:
            if length <= len(tail):
                found = self._positions.get(tuple(tail[-length:]))
                if found is not None and found[0] is not other_than:
                    answer, position = found
                    answer.is_used = True
                    return answer.tokens[position : position + count], _num_equal(answer.tokens, position, tail)
        return [], 0

    def forget_oldest(self) -> int:
        """Evict the oldest answer and return its number of tokens.

        If `continuation` has marked it as used, remove the mark, keep the answer as the newest one and return 0.
        """
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
                key = tuple(tokens[position - length : position]) if length <= position else None
                if key is not None and self._positions.get(key, (None, 0))[0] is answer:
                    del self._positions[key]
        self.num_tokens -= len(tokens)
        return len(tokens)
