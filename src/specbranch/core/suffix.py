"""Where a sequence repeats itself: what followed the last time after the same few tokens.

Drafts from the sequence itself cost no model. Summaries, answers from given sequences and edits of code copy long
stretches.
"""

from __future__ import annotations

from collections.abc import Sequence

LENGTHS = (5, 4, 3, 2)  # of the tokens that must agree, the longest tried first


class SuffixIndex:
    """Positions in a sequence by the tokens before them. It follows a list that only grows, a bounded part at a time.

    Memory: one entry for each position and length.
    """

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._num_read = 1
        self._positions: dict[tuple[int, ...], int] = {}

    def catch_up(self, most: int = 2048) -> None:
        """Take in what the sequence has gained, at most so many tokens; a long prompt takes several calls."""
        end = min(len(self._tokens), self._num_read + most)
        for position in range(self._num_read, end):
            for length in LENGTHS:
                if length <= position:
                    self._positions[tuple(self._tokens[position - length : position])] = position
        self._num_read = max(self._num_read, end)

    def after(self, tail: Sequence[int], count: int) -> tuple[list[int], int]:
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
