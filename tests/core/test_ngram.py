"""Guesses are planted behind nodes that were not run, by whoever was right most often."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from specbranch.core.costs import PairModel
from specbranch.core.distribution import Distribution
from specbranch.core.ngram import (
    LENGTHS,
    MAX_MATCH,
    MEMORY,
    MIN_MATCH,
    TEXT,
    HistoryBudget,
    NgramDrafter,
    NgramIndex,
    OutputHistory,
    PastOutput,
)
from specbranch.core.node import GreedyPicker
from specbranch.core.tree import Tree


def planted(costs: PairModel, tokens: list[int], count: int = 4, min_prob: float = 0.01) -> list[tuple[int, str, int]]:
    tree = Tree(tokens, GreedyPicker(), costs.calibration)
    guesser = NgramDrafter(tokens, costs.history)
    guesser.index_new_tokens()
    chain = guesser.extend(tree, tree.root, count, min_prob)
    assert [node.parent for node in chain] == [tree.root, *chain[:-1]][: len(chain)]
    return [(node.token, *node.guess_source) for node in chain if node.guess_source]


def test_a_chain_stands_on_ever_better_grounds() -> None:
    assert planted(PairModel(), [1, 2, 3, 9, 8, 7, 1, 2, 3]) == [(9, TEXT, 3), (8, TEXT, 4), (7, TEXT, 5), (1, TEXT, 6)]


def test_guesses_are_judged_by_how_long_a_context_matched() -> None:
    """What is known of shorter matches holds for longer ones too, until these were observed."""
    costs, text = PairModel(), list(range(40))
    assert planted(costs, [*text, 99, *text[:20]], count=2) == [(20, TEXT, 16), (21, TEXT, 16)]
    assert planted(costs, [*text, 99, *text[:7]], count=4) == [(7, TEXT, 6), (8, TEXT, 6), (9, TEXT, 9), (10, TEXT, 9)]

    for _ in range(20):
        costs.calibration.observe_guess((TEXT, 2), False)
        costs.calibration.observe_guess((TEXT, 5), True)
        costs.calibration.observe_guess((MEMORY, 9), False)
    probs = [costs.calibration.guess_accept_prob((TEXT, length)) for length in (2, 3, 5, 16)]
    assert probs[0] == probs[1] < 0.1 and 0.8 < probs[2] == probs[3]


def test_a_sequence_in_which_guesses_prove_wrong_gets_shorter_ones_than_the_others() -> None:
    costs = PairModel()
    for _ in range(100):
        costs.calibration.observe_guess((TEXT, 3), True)
    tokens = [1, 2, 3, 9, 8, 7, 6, 1, 2, 3]
    tree, guesser = Tree(tokens, GreedyPicker(), costs.calibration), NgramDrafter(tokens, costs.history)
    lens = []
    for index in range(4):
        lens.append(len(guesser.extend(tree, tree.root, 4, 0.2)))
        tree.commit([50 + index, 1, 2, 3])
        tokens += [50 + index, 1, 2, 3]

    assert lens[0] == 4 > lens[-1]
    assert costs.calibration.guess_accept_prob((TEXT, 3)) > 0.8, "of all sequences"


def test_other_answers_are_asked_where_the_text_has_nothing() -> None:
    costs = PairModel()
    costs.history.add(costs.history.begin(), [1, 2, 3, 4, 5])

    assert planted(costs, [7, 1, 2, 3]) == [(4, MEMORY, 3), (5, MEMORY, 4)]


def test_whoever_was_right_more_often_guesses() -> None:
    costs = PairModel()
    costs.history.add(costs.history.begin(), [1, 2, 3, 4])
    for source, is_right in ((TEXT, False), (MEMORY, True)):
        for _ in range(5):
            costs.calibration.observe_guess((source, 3), is_right)

    assert planted(costs, [1, 2, 3, 9, 8, 1, 2, 3], count=1) == [(4, MEMORY, 3)]
    for _ in range(50):
        costs.calibration.observe_guess((TEXT, 3), True)
    assert planted(costs, [1, 2, 3, 9, 8, 1, 2, 3], count=1) == [(9, TEXT, 3)]


def test_what_is_too_unlikely_is_not_planted() -> None:
    assert planted(PairModel(), [1, 2, 3, 9, 8, 7, 1, 2, 3], min_prob=0.3) == [(9, TEXT, 3)]


def test_nothing_is_planted_behind_a_node_that_ran() -> None:
    costs = PairModel()
    tokens = [1, 2, 3, 9, 8, 7, 1, 2, 3]
    tree = Tree(tokens, GreedyPicker(), costs.calibration)
    guesser = NgramDrafter(tokens, costs.history)
    guesser.index_new_tokens()
    chain = guesser.extend(tree, tree.root, 1, 0.01)
    tree.set_distribution(chain[0], Distribution((5,), (1.0,), 0.0))

    assert guesser.extend(tree, tree.root, 4, 0.01) == chain


def remembering(*answers: list[int], room: HistoryBudget | None = None) -> tuple[OutputHistory, list[PastOutput]]:
    memory = OutputHistory(room)
    own = []
    for answer in answers:
        own.append(memory.begin())
        memory.add(own[-1], answer)
    return memory, own


def test_what_followed_the_same_tokens_in_another_answer_is_found() -> None:
    memory, _ = remembering([1, 2, 3, 4, 5], [9, 2, 3, 4, 7, 8])

    assert memory.continuation([2, 3, 4], 5) == ([7, 8], 3), "the last answer counts"
    assert memory.continuation([1, 2, 3, 4], 5) == ([5], 4), "unless more tokens agree"
    assert memory.continuation([9, 2, 3, 4], 1) == ([7], 4)
    assert memory.continuation([0, 9, 2, 3, 4], 1) == ([7], 4)
    assert memory.continuation([3, 4], 5) == ([], 0), "two tokens are too few"
    assert memory.continuation([4, 4, 4], 5) == ([], 0)


def test_an_answer_does_not_repeat_itself_here() -> None:
    memory, (one, _) = remembering([1, 2, 3, 4], [5, 6, 7, 8])

    assert memory.continuation([1, 2, 3], 2, other_than=one) == ([], 0)
    assert memory.continuation([5, 6, 7], 2, other_than=one) == ([8], 3)


def test_it_grows_with_an_answer_that_is_still_being_given() -> None:
    memory, (answer,) = remembering([1, 2, 3])
    assert memory.continuation([1, 2, 3], 2) == ([], 0)
    memory.add(answer, [4])
    memory.add(answer, [5])

    assert memory.continuation([1, 2, 3], 9) == ([4, 5], 3)


@given(st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=12), st.data())
def test_it_stays_within_its_room_and_forgets_whole_answers(answers: list[list[int]], data: st.DataObject) -> None:
    memories = [OutputHistory(room) for room in [HistoryBudget(capacity=20)] for _ in range(3)]
    for tokens in answers:
        memory = data.draw(st.sampled_from(memories))
        memory.continuation(tokens, 3)
        memory.add(memory.begin(), tokens)

    assert sum(memory.num_tokens for memory in memories) <= 20
    for memory in memories:
        kept = list(memory._answers)
        assert memory.num_tokens == sum(len(answer.tokens) for answer in kept)
        assert not any(answer.is_forgotten for answer in kept)
        assert all(any(answer is one for one in kept) for answer, _ in memory._positions.values())
        for key, (answer, position) in memory._positions.items():
            assert answer.tokens[position - len(key) : position] == list(key)
            assert len(key) in LENGTHS


def test_what_was_of_use_is_forgotten_last() -> None:
    memory, _ = remembering([1, 2, 3, 4, 5], [6, 7, 8, 9, 10], room=HistoryBudget(capacity=12))
    memory.continuation([1, 2, 3], 1)
    memory.add(memory.begin(), [11, 12, 13, 14, 15])

    assert memory.continuation([1, 2, 3], 1) == ([4], 3)
    assert memory.continuation([6, 7, 8], 1) == ([], 0)
    memory.add(memory.begin(), [16, 17, 18, 19, 20])
    memory.add(memory.begin(), [21, 22, 23, 24, 25])
    assert memory.continuation([1, 2, 3], 1) == ([4], 3), "used again meanwhile"


def test_a_busy_target_forgets_its_own_answers_and_an_idle_one_gives_way_in_time() -> None:
    room = HistoryBudget(capacity=100)
    idle, _ = remembering(list(range(10)), room=room)
    busy, _ = remembering(*([index] * 20 for index in range(5)), room=room)
    assert idle.num_tokens == 10 and busy.num_tokens == 80, "its own, which are more"

    for index in range(20):
        busy.add(busy.begin(), [index] * 20)
    assert idle.num_tokens == 0 and busy.num_tokens == 100


def test_an_answer_that_was_forgotten_while_it_grew_stays_forgotten() -> None:
    memory, (first, *_) = remembering([1, 2, 3, 4], [5, 6, 7, 8], [1, 1, 1, 1], room=HistoryBudget(capacity=8))
    assert first.is_forgotten
    memory.add(first, [1, 2, 3, 4, 5])

    assert memory.continuation([1, 2, 3], 2) == ([], 0)
    assert memory.num_tokens == 8


def test_an_answer_of_which_no_token_came_takes_no_room() -> None:
    memory = OutputHistory()
    for _ in range(3):
        memory.begin()
    memory.add(memory.begin(), [1, 2])

    assert [answer.tokens for answer in memory._answers] == [[1, 2]]


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
    index.index_new_tokens(max_tokens=2)
    assert index.continuation([], 1) == ([4], 3)
    tokens += [7, 8, 3, 7]
    assert index.continuation([], 1) == ([], 0), "not read yet"
    for _ in range(4):
        index.index_new_tokens(max_tokens=2)
    assert index.continuation([], 1) == ([8], 2)


def searched(tokens: list[int], tail: list[int]) -> tuple[list[int], int]:
    """What a plain search finds: the longest context first, and its last occurrence."""
    end = [*tokens, *tail]
    for length in range(MAX_MATCH, MIN_MATCH - 1, -1):
        for position in range(len(tokens) - 1, length - 1, -1):
            if length <= len(end) and tokens[position - length : position] == end[-length:]:
                return tokens[position : position + 3], length
    return [], 0


# Of up to 34 tokens, no more than 32 positions can share a context of three.
@given(st.lists(st.integers(0, 2), min_size=1, max_size=34), st.lists(st.integers(0, 2), max_size=4))
def test_it_finds_what_a_search_finds(tokens: list[int], tail: list[int]) -> None:
    index = NgramIndex(tokens)
    index.index_new_tokens(max_tokens=random.Random(len(tokens)).randint(34, 80))

    assert index.continuation(tail, 3) == searched(tokens, tail)


@given(st.integers(), st.lists(st.integers(1, 150), min_size=1, max_size=5))
def test_a_long_text_is_searched_alike_in_whatever_pieces_it_comes(seed: int, pieces: list[int]) -> None:
    chance = random.Random(seed)  # in such a text no three tokens occur often
    tokens: list[int] = [0]
    index = NgramIndex(tokens)
    for piece in pieces:
        tokens += [chance.choice((chance.randrange(12), chance.randrange(2**31))) for _ in range(piece)]
        index.index_new_tokens(max_tokens=chance.randrange(1, 200))
    while index.num_indexed < len(tokens):
        index.index_new_tokens(max_tokens=chance.randrange(1, 200))

    for _ in range(8):
        tail = [chance.randrange(12) for _ in range(chance.randrange(6))]
        assert index.continuation(tail, 3) == searched(tokens, tail)


def test_only_the_newest_of_many_positions_with_the_same_three_tokens_are_compared() -> None:
    common, rare = [1, 2, 3], [9, 1, 2, 3, 5]
    near = [*rare, *(token for index in range(20) for token in (100 + index, *common)), 8]
    far = [*rare, *(token for index in range(40) for token in (100 + index, *common)), 8]
    found = []
    for tokens in (near, far):
        index = NgramIndex(tokens)
        index.index_new_tokens()
        found.append(index.continuation([9, *common], 1))

    assert found == [([5], 4), ([8], 3)]
