"""Guesses of the next tokens that cost next to nothing: what followed the same tokens before.

A guess is planted in the draft tree below a node that was not run. The draft then runs the node and all that is guessed
behind it in one step, and its distributions confirm the guess or not; or the target verifies it at once. Either way a
guess can only be right or wasted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from specbranch.core.calibration import Grounds
from specbranch.core.memory import Answer, AnswerMemory
from specbranch.core.node import Node
from specbranch.core.suffix import LENGTHS, SuffixIndex
from specbranch.core.tree import Tree

TEXT = "text"  # the sequence's own repetitions
MEMORY = "memory"  # past answers of the same target
SOURCES = (TEXT, MEMORY)

Guess = list[tuple[int, Grounds]]  # tokens in a row


class Guesser:
    """Guesses for one sequence. `answer` is its own part of the memory, which it does not guess from."""

    def __init__(self, tokens: list[int], memory: AnswerMemory, answer: Answer | None = None) -> None:
        self._tokens = tokens
        self._suffixes = SuffixIndex(tokens)
        self._memory = memory
        self._answer = answer

    def catch_up(self, most: int = 2048) -> None:
        """Take in what the sequence has gained, at most so many tokens."""
        self._suffixes.catch_up(most)

    def plant(self, tree: Tree, tip: Node, count: int, least: float, sources: Collection[str] = SOURCES) -> list[Node]:
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
            if tree.chance(tip) * tree.calibration.guess_chance(grounds) < least:
                break
            tip = tree.plant(tip, token, grounds)
            chain.append(tip)
        return chain

    def _best(self, tree: Tree, tip: Node, count: int, sources: Collection[str]) -> Guess:
        """The guess of whoever was right most often on such grounds."""
        tail = tip.path(most=LENGTHS[0])
        found: list[Guess] = []
        if TEXT in sources:
            found.append(_repeated(TEXT, *self._suffixes.after(tail, count)))
        if MEMORY in sources:
            end = [*self._tokens[-LENGTHS[0] :], *tail][-LENGTHS[0] :]
            found.append(_repeated(MEMORY, *self._memory.after(end, count, other_than=self._answer)))
        chance = tree.calibration.guess_chance
        return max(filter(None, found), key=lambda guess: chance(guess[0][1]), default=[])


def _repeated(source: str, tokens: Sequence[int], num_agreed: int) -> Guess:
    """Each guessed token that comes true is one more that agrees."""
    return [(token, (source, min(num_agreed + index, LENGTHS[0]))) for index, token in enumerate(tokens)]
