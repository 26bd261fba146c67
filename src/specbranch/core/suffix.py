"""Where a text repeats itself: what followed the last time when the same few tokens stood there.

Drafts from the text itself cost no model. Summaries, answers from given texts and edits of code copy long stretches.
"""

from __future__ import annotations

from collections.abc import Sequence

LENGTHS = (5, 4, 3, 2)  # of the tokens that must agree, the longest tried first


class SuffixIndex:
    """The places of a text by the tokens before them. It follows a list that only grows, a bounded part at a time.

    Memory: one entry for each place and length.
    """

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._num_read = 1
        self._places: dict[tuple[int, ...], int] = {}

    def catch_up(self, most: int = 2048) -> None:
        """Take in what the text has gained, at most so many tokens; a long prompt takes several calls."""
        end = min(len(self._tokens), self._num_read + most)
        for place in range(self._num_read, end):
            for length in LENGTHS:
                if length <= place:
                    self._places[tuple(self._tokens[place - length : place])] = place
        self._num_read = max(self._num_read, end)

    def after(self, tail: Sequence[int], count: int) -> tuple[list[int], int]:
        """What followed the text's end and `tail` the last time, at most `count` tokens, and how many tokens agreed.

        Nothing, and 0, if they never stood there before.
        """
        longest = LENGTHS[0]
        end = [*self._tokens[-longest:], *tail][-longest:]
        for length in LENGTHS:
            if length <= len(end):
                place = self._places.get(tuple(end[-length:]))
                if place is not None:
                    return self._tokens[place : place + count], length
        return [], 0
