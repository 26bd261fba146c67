"""N-gram drafts: what followed the same few tokens before, in this sequence or in past answers.

A guess is a token of such a draft. It is added to the draft tree below a node whose next-token distribution the draft
model has not computed. The draft model then computes the distributions after this node and after the guesses below it
in one step, which confirm the guesses or not; or the target verifies the guesses at once. Either way a wrong guess only
wastes time.

Guesses from the sequence itself need no model. They help where text is copied: in summaries, in answers about a given
text, in edits of code. Past answers are kept too, because repeated questions, agents in loops and edits of one file
repeat most of an answer. Their number of tokens is limited. The service keeps a separate history for each namespace, so
guesses never come from another namespace.

All positions where the end of the sequence occurred before vote for the token that followed there. A vote counts eight
times as much for each further token that matches, so a longer match outvotes shorter ones unless these are many. How
often a guess is right is learned by the length of its match and by its share of the votes (`core/calibration.py`).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from specbranch.core.calibration import MEMORY, TEXT, Grounds
from specbranch.core.node import Node
from specbranch.core.tree import Tree

SOURCES = (TEXT, MEMORY)
MAX_MATCH = 16  # tokens of a context that are compared: longer matches are better

_LENGTHS = (3, 2, 1)  # tokens by which positions are found; fewer only if more find nothing
_MAX_MATCHES = 16  # positions that vote: the newest ones
_MAX_STEPS = 64  # positions of the same place in the table that are looked at
_VOTES = tuple(8.0**length for length in range(MAX_MATCH + 1))  # what a vote counts, by the number of tokens that match
_MAX_ALONE = 64  # tokens that the last remaining position gives
_MAX_NEWEST = 2048  # tokens to index right before a guess; an answer to the target may wait for this
_MAX_LOAD = 4  # positions for each entry of the table of hashes
_MIN_VECTORISED = 64  # new positions from which NumPy is faster than a loop
_HASH_BITS, _MASK, _MIXER = 32, 0xFFFFFFFF, 0x9E3779B1
_CAPACITY = 1 << 20  # tokens in the histories of all targets together; 50 to 100 bytes each
_GENERATION = 1 << 16  # tokens of past answers that one index holds


class Match(NamedTuple):
    """A position in a list of tokens, and how many tokens before it equal the end of the context."""

    length: int
    position: int
    tokens: Sequence[int]


class NgramDrafter:
    """Drafts the next tokens of one sequence by n-gram lookup in the sequence itself and in past answers.

    `tokens` is the growing list of the sequence's tokens. `history` holds past answers; `answer` is the sequence's own
    answer among these, from which nothing is guessed.
    """

    def __init__(self, tokens: list[int], history: OutputHistory, answer: PastOutput | None = None) -> None:
        self._tokens = tokens
        self._history = history
        self._answer = answer
        self._index = NgramIndex()
        self._num_indexed = 1  # the first token has none before it

    def index_new_tokens(self, max_tokens: int = 8192) -> None:
        """Index tokens of the sequence that are not indexed yet, at most `max_tokens` in each call."""
        end = min(len(self._tokens), self._num_indexed + max_tokens)
        if end > self._num_indexed:
            self._index.add(self._tokens, self._num_indexed, end)
            self._num_indexed = end

    def extend(
        self, tree: Tree, tip: Node, count: int, min_prob: float, sources: Collection[str] = SOURCES
    ) -> list[Node]:
        """Add at most `count` guessed nodes as a chain below `tip`, and return these nodes.

        Return none if the draft model has computed the distribution after `tip`. The chain ends before a guess that the
        target reaches from the root with a probability below `min_prob`; that guess is added too, to learn how often
        such guesses are right, but not returned. `sources`: where guesses may come from, `TEXT`, `MEMORY` or both.
        """
        if TEXT in sources and self._num_indexed < len(self._tokens):
            self.index_new_tokens(_MAX_NEWEST)
        chain: list[Node] = []
        num_before = -1
        while (
            tip.distribution is None and num_before < len(chain) < count
        ):  # a chain whose matches have ended may match something else now
            num_before = len(chain)
            for token, grounds in self._guesses(tip, sources):
                if len(chain) == count or tip.distribution is not None:
                    return chain
                guess = tree.add_guess(tip, token, grounds)
                if tree.path_prob(guess) < min_prob:
                    return chain
                chain.append(guess)
                tip = guess
        return chain

    def _guesses(self, tip: Node, sources: Collection[str]) -> Iterator[tuple[int, Grounds]]:
        """Yield the tokens that may follow `tip`, one after another, each with its grounds.

        At each token only the positions go on that have voted for it.
        """
        tail = tip.path(max_len=MAX_MATCH)
        context = [*self._tokens[-MAX_MATCH:], *tail][-MAX_MATCH:]
        matches: list[_Voter] = []
        if TEXT in sources:
            matches += [(*match, TEXT) for match in self._index.matches(context)]
        if MEMORY in sources:
            own = self._answer.tokens if self._answer is not None else None
            matches += [(*match, MEMORY) for match in self._history.matches(context, own)]
        matches.sort(key=_LENGTH, reverse=True)
        while len(matches) > 1:
            winner, share, matches = _vote(matches)
            if not matches:
                return
            yield winner, Grounds.of(matches[0][3], matches[0][0] - 1, share)
        for length, position, tokens, source in matches:
            for index, token in enumerate(tokens[position : position + _MAX_ALONE]):
                yield token, Grounds.of(source, length + index, 1.0)


_Voter = tuple[int, int, Sequence[int], str]  # a match, and its source
_LENGTH = itemgetter(0)


def _vote(matches: Sequence[_Voter]) -> tuple[int, float, list[_Voter]]:
    """Return the token with the most votes, its share of the votes, and the matches that voted for it, one token on.

    The first match has the longest context. There are no such matches if all are at the end of their lists.
    """
    votes: dict[int, float] = {}
    for length, position, tokens, _ in matches:
        if position < len(tokens):
            token = tokens[position]
            votes[token] = votes.get(token, 0.0) + _VOTES[min(length, MAX_MATCH)]
    if not votes:
        return 0, 0.0, []
    winner = max(votes, key=votes.__getitem__) if len(votes) > 1 else token
    agreeing = [
        (length + 1, position + 1, tokens, source)
        for length, position, tokens, source in matches
        if position < len(tokens) and tokens[position] == winner
    ]
    return winner, votes[winner] / sum(votes.values()), agreeing


class NgramIndex:
    """Finds where the last tokens of a context occurred in lists of tokens, which may only grow.

    Memory: 24 bytes for each token, 3 to 24 for the tables, and 20 for each segment, besides the lists. One thread may
    look up while another adds tokens.
    """

    def __init__(self) -> None:
        self._chains = [_HashChains() for _ in _LENGTHS]
        # Positions of all lists are numbered in the order in which they were added. A segment is a part of a list; its
        # shift is the difference between the numbers and the positions in the list. Answers that grow at the same time
        # begin a segment with almost every token, so segments are in arrays.
        self._lists: list[Sequence[int]] = []
        self._shifts = array("q")
        self._starts = array("i")

    @property
    def num_positions(self) -> int:
        """Number of indexed positions."""
        return len(self._chains[0]) - 1

    def add(self, tokens: Sequence[int], begin: int, end: int) -> None:
        """Index the positions of `tokens` from `begin` to `end`, without it; `begin` must be at least 1."""
        shift = len(self._chains[0]) - begin
        if not self._lists or self._lists[-1] is not tokens or self._shifts[-1] != shift:
            self._lists.append(tokens)
            self._shifts.append(shift)
            self._starts.append(begin + shift)  # at last: another thread may be reading
        is_many = end - begin >= _MIN_VECTORISED
        for length, chains in zip(_LENGTHS, self._chains, strict=True):
            if is_many:
                chains.append_all(_hashes(tokens, begin, end, length))
            else:
                chains.append([_hash(tokens[max(position - length, 0) : position]) for position in range(begin, end)])

    def matches(self, context: Sequence[int], other_than: Sequence[int] | None = None) -> list[Match]:
        """Return the newest positions that follow an occurrence of the last tokens of `context`, at most 16.

        The newest comes first. At least three tokens match; if no such position is found, two, or else one. Positions
        in the list `other_than` are left out.
        """
        for length, chains in zip(_LENGTHS, self._chains, strict=True):
            if length > len(context):
                continue
            found: list[Match] = []
            for number in chains.find(_hash(context[-length:])):
                segment = bisect_right(self._starts, number) - 1
                tokens, position = self._lists[segment], number - self._shifts[segment]
                num_equal = _num_equal(tokens, position, context)
                if num_equal >= length and tokens is not other_than:
                    found.append(Match(num_equal, position, tokens))
            if found:
                return found
        return []


class _HashChains:
    """Numbers from 1 on, each with a hash, chained so that the newest numbers with a given hash are found at once."""

    def __init__(self) -> None:
        self._hashes = array("I", [0])  # by number
        self._previous = array("i", [0])  # by number, the next older one at the same place of the table
        # How far a hash is shifted to its place, and the newest number at each place, where 0 is none. They are
        # replaced together, because another thread may be reading.
        self._table = _HASH_BITS, array("i", [0])

    def __len__(self) -> int:
        """Return the next number."""
        return len(self._hashes)

    def append(self, hashes: Iterable[int]) -> None:
        """Add the next numbers with these hashes, one after another."""
        shift, newest = self._table
        for one in hashes:
            place = one >> shift
            number = len(self._hashes)
            self._previous.append(newest[place])
            self._hashes.append(one)
            newest[place] = number  # at last: another thread may be reading
        if len(self._hashes) > _MAX_LOAD * len(newest):
            self._rebuild()

    def append_all(self, hashes: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> None:
        """Add the next numbers with these hashes, all together."""
        begin = len(self._hashes)
        self._previous.frombytes(bytes(4 * len(hashes)))
        self._hashes.frombytes(hashes.tobytes())
        if len(self._hashes) > _MAX_LOAD * len(self._table[1]):
            self._rebuild()
        else:
            self._chain(begin, *self._table)

    def find(self, hash: int) -> list[int]:
        """Return the newest numbers with this hash, at most 16, newest first."""
        shift, newest = self._table
        hashes, previous = self._hashes, self._previous
        found: list[int] = []
        number = newest[hash >> shift]
        for _ in range(_MAX_STEPS):
            if not number or len(found) == _MAX_MATCHES:
                break
            if hashes[number] == hash:
                found.append(number)
            number = previous[number]
        return found

    def _rebuild(self) -> None:
        """Replace the table by one with more places than there are numbers."""
        bits = len(self._hashes).bit_length()
        table = _HASH_BITS - bits, array("i", bytes(4 << bits))
        self._chain(1, *table)
        self._table = table

    def _chain(self, begin: int, shift: int, newest: array[int]) -> None:
        """Enter the numbers from `begin` on into a table, by sorting their places."""
        # One number holds place and number, so a plain sort keeps the order of numbers at the same place.
        hashes = np.frombuffer(self._hashes, dtype=np.uint32)[begin:]
        keys = (hashes >> np.uint32(shift)).astype(np.int64) << _HASH_BITS
        keys += np.arange(begin, begin + len(hashes))
        keys.sort()
        places, numbers = keys >> _HASH_BITS, keys.astype(np.int32)
        heads = np.frombuffer(newest, dtype=np.int32)
        is_first = np.append(True, places[1:] != places[:-1])
        older = np.where(is_first, heads[places], np.append(np.int32(0), numbers[:-1]))
        np.frombuffer(self._previous, dtype=np.int32)[numbers] = older
        heads[places] = numbers  # of the same place the last remains


def _hash(context: Sequence[int]) -> int:
    mixed = 0
    for token in context:
        mixed = (mixed + token) * _MIXER & _MASK
    return mixed


def _hashes(tokens: Sequence[int], begin: int, end: int, length: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Return the hashes of the `length` tokens before each position from `begin` to `end`, without it.

    A position with fewer tokens before it has the hash of these.
    """
    first = min(max(begin, length), end)
    short = [_hash(tokens[:position]) for position in range(begin, first)]
    window = np.array(array("i", tokens[first - length : end - 1]) if end > first else [], dtype=np.int32).view(
        np.uint32
    )
    mixed = np.zeros(end - first, dtype=np.uint32)
    for index in range(length):
        mixed += window[index : index + end - first]
        mixed *= np.uint32(_MIXER)
    return np.append(np.array(short, dtype=np.uint32), mixed)


def _num_equal(tokens: Sequence[int], position: int, context: Sequence[int]) -> int:
    """Return how many tokens before `position` equal the end of `context`."""
    num = 0
    for token in reversed(context[-position:]):
        if tokens[position - 1 - num] != token:
            break
        num += 1
    return num


class PastOutput:
    """The tokens of one answer in an `OutputHistory`, growing or complete."""

    __slots__ = ("tokens",)

    def __init__(self) -> None:
        self.tokens = array("i")


class HistoryBudget:
    """A limit on the number of tokens that several histories hold together.

    While it is exceeded, the history with the largest product of size and idle time forgets its older half.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._num_tokens = 0
        self._now = 0
        self._last: dict[OutputHistory, int] = {}  # when each history grew last

    def take(self, history: OutputHistory, change: int) -> None:
        """Add `change`, by which the number of tokens in `history` has changed, to the total, and enforce the limit.

        While the total exceeds the limit, the history with the largest product of size and idle time drops its older
        tokens.
        """
        self._now += 1
        self._last[history] = self._now
        self._num_tokens += change
        while self._num_tokens > self._capacity:
            fullest = max(self._last, key=lambda one: one.num_tokens * (1 + self._now - self._last[one]))
            self._num_tokens -= fullest.forget_older()
            if not fullest.num_tokens:
                del self._last[fullest]


class OutputHistory:
    """Keeps the latest past answers, and finds the tokens that followed a context in them.

    They are in two indexes of at most `generation` tokens: when the newer is full, it replaces the older, so nothing is
    ever removed from an index. `room` is the limit on the number of tokens kept; several histories may share it. One
    thread may look up matches while another adds tokens.
    """

    def __init__(self, room: HistoryBudget | None = None, generation: int = _GENERATION) -> None:
        self._room = room or HistoryBudget()
        self._generation = generation
        self._indexes = NgramIndex(), NgramIndex()  # the newer one first; replaced together

    @property
    def num_tokens(self) -> int:
        """Number of tokens that can be found."""
        return sum(index.num_positions for index in self._indexes)

    def begin(self) -> PastOutput:
        """Return a new, empty answer to pass to `add`."""
        return PastOutput()

    def add(self, answer: PastOutput, tokens: Sequence[int]) -> None:
        """Append tokens to an answer and index them; if too many are kept then, forget the oldest."""
        begin = max(len(answer.tokens), 1)
        answer.tokens.extend(tokens)
        end = len(answer.tokens)
        if end <= begin:
            return
        change = end - begin
        newer, older = self._indexes
        if newer.num_positions >= self._generation:
            change -= older.num_positions
            newer, older = NgramIndex(), newer
            self._indexes = newer, older
        newer.add(answer.tokens, begin, end)
        self._room.take(self, change)

    def matches(self, context: Sequence[int], other_than: Sequence[int] | None = None) -> list[Match]:
        """Return the positions in past answers that follow an occurrence of the last tokens of `context`.

        The matches are those of `NgramIndex.matches`. The older index is searched only if the newer one has no match.
        `other_than` has the tokens of an answer whose own matches are left out.
        """
        newer, older = self._indexes
        return newer.matches(context, other_than) or older.matches(context, other_than)

    def forget_older(self) -> int:
        """Forget the older half of the tokens, or all if there is no older half; return how many were forgotten."""
        newer, older = self._indexes
        forgotten = older if older.num_positions else newer
        self._indexes = (newer if forgotten is older else NgramIndex()), NgramIndex()
        return forgotten.num_positions
