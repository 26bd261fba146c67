"""The index of a text: what followed the same tokens the last time."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from specbranch.core.ngram import LENGTHS, NgramIndex


def test_the_longest_agreement_counts_and_of_those_the_last() -> None:
    index = NgramIndex([1, 2, 3, 4, 9, 2, 3, 5, 9, 9, 2, 3])
    index.index_new_tokens()

    assert index.continuation([], 3) == ([5, 9, 9], 3)  # 9 2 3 stood before 5
    assert index.continuation([4], 2) == ([9, 2], 3)  # 2 3 4
    assert index.continuation([7], 2) == ([], 0)


def test_a_text_does_not_agree_with_its_own_end() -> None:
    index = NgramIndex([1, 2])
    index.index_new_tokens()

    assert index.continuation([], 4) == ([], 0)


def test_it_follows_a_text_that_grows_a_bounded_part_at_a_time() -> None:
    tokens = [1, 2, 3]
    index = NgramIndex(tokens)
    index.index_new_tokens()
    tokens += [4, 1, 2, 3]
    index.index_new_tokens(most=2)
    assert index.continuation([], 1) == ([4], 3)
    tokens += [7, 8, 3, 7]
    assert index.continuation([], 1) == ([], 0), "not read yet"
    for _ in range(4):
        index.index_new_tokens(most=2)
    assert index.continuation([], 1) == ([8], 2)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.lists(st.integers(0, 2), max_size=4))
def test_it_finds_what_a_search_finds(tokens: list[int], tail: list[int]) -> None:
    index = NgramIndex(tokens)
    index.index_new_tokens(most=random.Random(len(tokens)).randint(40, 80))
    end = [*tokens, *tail]
    expected: tuple[list[int], int] = ([], 0)
    for length in LENGTHS:
        places = [p for p in range(length, len(tokens)) if tokens[p - length : p] == end[-length:]]
        if places and length <= len(end):
            expected = (tokens[places[-1] : places[-1] + 3], length)
            break

    assert index.continuation(tail, 3) == expected
