"""Guesses are planted behind nodes that were not run, by whoever was right most often."""

from __future__ import annotations

import json
import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbranch.core import calibration
from specbranch.core.calibration import LENGTHS, MEMORY, SHARES, TEXT, Grounds, prior_guess_prob
from specbranch.core.costs import PairModel
from specbranch.core.distribution import Distribution
from specbranch.core.ngram import (
    MAX_MATCH,
    HistoryBudget,
    Match,
    NgramDrafter,
    NgramIndex,
    OutputHistory,
    PastOutput,
    _hash,
)
from specbranch.core.node import GreedyPicker
from specbranch.core.tree import Tree
from tests.root import ROOT

Planted = list[tuple[int, str, int, int]]


def planted(costs: PairModel, tokens: list[int], count: int = 4, min_prob: float = 0.01) -> Planted:
    """Return the guessed tokens with their sources, and where the classes of their lengths and shares begin."""
    tree = Tree(tokens, GreedyPicker(), costs.calibration)
    guesser = NgramDrafter(tokens, costs.history)
    guesser.index_new_tokens()
    chain = guesser.extend(tree, tree.root, count, min_prob)
    assert [node.parent for node in chain] == [tree.root, *chain[:-1]][: len(chain)]
    return [
        (node.token, grounds.source, LENGTHS[grounds.length], grounds.share)
        for node in chain
        if (grounds := node.guess_source)
    ]


def seen(costs: PairModel, source: str, length: int, share: float, is_right: bool, times: int = 200) -> None:
    for _ in range(times):
        costs.calibration.observe_guess(Grounds.of(source, length, share), is_right)


def test_a_chain_stands_on_ever_better_grounds() -> None:
    text = [1, 2, 3, 9, 8, 7, 1, 2, 3]
    assert planted(PairModel(), text) == [(9, TEXT, 3, 3), (8, TEXT, 4, 3), (7, TEXT, 5, 3), (1, TEXT, 6, 3)]


def test_guesses_are_judged_by_how_long_a_context_matched_and_by_their_share_of_the_votes() -> None:
    costs, text = PairModel(), list(range(40))
    assert planted(costs, [*text, 99, *text[:20]], count=2) == [(20, TEXT, 16, 3), (21, TEXT, 16, 3)]
    assert planted(costs, [*text, 99, *text[:7]], count=2) == [(7, TEXT, 6, 3), (8, TEXT, 6, 3)]
    # Two of three positions say 4; the third, with the same three tokens before it, says 5.
    assert planted(costs, [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 4, 9, 1, 2, 3], count=1) == [(4, TEXT, 3, 2)]

    for length in (2, 5):
        seen(costs, TEXT, length, 1.0, is_right=length == 5)
    seen(costs, MEMORY, 9, 1.0, is_right=False)
    probs = [costs.calibration.guess_accept_prob(Grounds.of(TEXT, length, 1.0)) for length in (2, 3, 5, 9)]
    assert probs[0] < 0.1 < probs[1] < 0.9 < probs[2]
    assert probs[3] == pytest.approx(prior_guess_prob(Grounds.of(TEXT, 9, 1.0)))


def test_before_any_guess_longer_matches_and_larger_shares_are_trusted_more_and_the_own_text_most() -> None:
    for source in (TEXT, MEMORY):
        for values in (
            [prior_guess_prob(Grounds.of(source, length, 1.0)) for length in LENGTHS],
            [prior_guess_prob(Grounds.of(source, 3, share)) for share in SHARES],
        ):
            assert values == sorted(values) and 0 < values[0] < values[-1] < 1
    assert prior_guess_prob(Grounds.of(TEXT, 1, 1.0)) > prior_guess_prob(Grounds.of(MEMORY, 1, 1.0))


def test_what_is_assumed_of_guesses_is_what_was_fitted() -> None:
    fitted = json.loads((ROOT / "studies/07-guesses/prior.json").read_text())

    assert fitted["lines"] == {source: list(line) for source, line in calibration._GUESS_LINES.items()}
    assert tuple(fitted["shares"]) == calibration._GUESS_SHARES


def test_a_longer_match_outvotes_a_shorter_one_unless_these_are_many() -> None:
    long, short = [9, 2, 3, 4, 7], [0, 2, 3, 4, 8]
    assert planted(PairModel(), [*long, *short * 3, 9, 2, 3, 4], count=1)[0][0] == 7
    assert planted(PairModel(), [*long, *short * 9, 9, 2, 3, 4], count=1)[0][0] == 8


def test_a_sequence_in_which_guesses_prove_wrong_gets_shorter_ones_than_the_others() -> None:
    costs = PairModel()
    for length in (1, 2, 3, 4, 5, 6):
        seen(costs, TEXT, length, 1.0, is_right=True)
    tokens = [1, 2, 3, 9, 8, 7, 6, 1, 2, 3]
    tree, guesser = Tree(tokens, GreedyPicker(), costs.calibration), NgramDrafter(tokens, costs.history)
    lens = []
    for index in range(20):
        lens.append(len(guesser.extend(tree, tree.root, 4, 0.2)))
        tree.commit([50 + index, 1, 2, 3])
        tokens += [50 + index, 1, 2, 3]

    assert lens[0] == 4 > lens[-1]


def test_other_answers_are_asked_where_the_text_has_nothing() -> None:
    costs = PairModel()
    costs.history.add(costs.history.begin(), [1, 2, 3, 4, 5])

    assert planted(costs, [7, 1, 2, 3]) == [(4, MEMORY, 3, 3), (5, MEMORY, 4, 3)]


def test_text_and_past_answers_vote_together() -> None:
    costs = PairModel()
    for _ in range(2):
        costs.history.add(costs.history.begin(), [1, 2, 3, 4])

    assert planted(costs, [1, 2, 3, 9, 8, 1, 2, 3], count=1) == [(4, MEMORY, 3, 2)]
    assert planted(costs, [1, 2, 3, 9, 1, 2, 3, 9, 1, 2, 3, 9, 8, 1, 2, 3], count=1) == [(9, TEXT, 3, 2)]


def test_what_is_too_unlikely_is_planted_to_learn_from_it_but_not_returned() -> None:
    tokens = [1, 2, 3, 9, 8, 7, 1, 2, 3]
    costs = PairModel()
    tree = Tree(tokens, GreedyPicker(), costs.calibration)
    guesser = NgramDrafter(tokens, costs.history)
    chain = guesser.extend(tree, tree.root, 4, 0.7)

    assert [node.token for node in chain] == [9]
    assert [node.token for node in chain[0].children] == [8]


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


def followers(matches: list[Match]) -> list[tuple[int, int]]:
    """Return the token that follows each match, and how many tokens matched."""
    return [(match.tokens[match.position], match.length) for match in matches]


def test_what_followed_the_same_tokens_in_another_answer_is_found() -> None:
    memory, _ = remembering([1, 2, 3, 4, 5], [9, 2, 3, 4, 7, 8])

    assert followers(memory.matches([2, 3, 4])) == [(7, 3), (5, 3)], "the newest first"
    assert followers(memory.matches([1, 2, 3, 4])) == [(7, 3), (5, 4)]
    assert followers(memory.matches([0, 0, 2])) == [(3, 1), (3, 1)], "a single token, where no more match"
    assert memory.matches([0, 3, 3, 2]) == memory.matches([2]) and not memory.matches([0])


def test_an_answer_does_not_repeat_itself_here() -> None:
    memory, (one, _) = remembering([1, 2, 3, 4], [5, 6, 7, 8])

    assert memory.matches([1, 2, 3], one.tokens) == []
    assert followers(memory.matches([5, 6, 7], one.tokens)) == [(8, 3)]


def test_it_grows_with_answers_that_are_still_being_given() -> None:
    memory, (answer, other) = remembering([1, 2, 3], [6])
    assert memory.matches([1, 2, 3]) == []
    for index in range(3):
        memory.add(answer, [4 + index])
        memory.add(other, [14 + index])

    assert followers(memory.matches([1, 2, 3])) == [(4, 3)]
    assert followers(memory.matches([3, 4, 5])) == [(6, 3)]
    assert followers(memory.matches([6, 14, 15])) == [(16, 3)]


def test_of_many_answers_the_latest_are_kept() -> None:
    memory = OutputHistory(generation=8)
    for first in range(0, 100, 5):
        memory.add(memory.begin(), list(range(first, first + 5)))
        assert memory.num_tokens <= 8 + 2 * 8

    assert not memory.matches([0, 1, 2])
    assert followers(memory.matches([95, 96, 97])) == [(98, 3)]
    assert followers(memory.matches([85, 86, 87])) == [(88, 3)], "in the older half"


def test_a_growing_answer_is_found_beyond_the_change_of_indexes() -> None:
    memory = OutputHistory(generation=8)
    answer = memory.begin()
    for token in range(30):
        memory.add(answer, [token])

    assert followers(memory.matches([26, 27, 28])) == [(29, 3)]


@given(st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=12), st.data())
def test_histories_stay_within_their_room(answers: list[list[int]], data: st.DataObject) -> None:
    memories = [OutputHistory(room, generation=9) for room in [HistoryBudget(capacity=20)] for _ in range(3)]
    for tokens in answers:
        memory = data.draw(st.sampled_from(memories))
        memory.add(memory.begin(), tokens)
        assert sum(memory.num_tokens for memory in memories) <= 20
        for length, position, kept in memory.matches(tokens):
            assert list(kept[position - length : position]) == tokens[-length:]


def test_a_busy_target_forgets_its_own_answers_and_an_idle_one_gives_way_in_time() -> None:
    room = HistoryBudget(capacity=100)
    idle, _ = remembering(list(range(11)), room=room)
    busy, _ = remembering(*([index] * 21 for index in range(5)), room=room)
    assert idle.num_tokens == 10 and busy.num_tokens <= 90, "its own, which are more"

    for index in range(40):
        busy.add(busy.begin(), [index] * 11)
    assert idle.num_tokens == 0 and busy.num_tokens


def test_an_answer_of_which_no_token_came_takes_no_room() -> None:
    memory = OutputHistory()
    for _ in range(3):
        memory.add(memory.begin(), [])
    memory.add(memory.begin(), [1, 2])

    assert memory.num_tokens == 1 and followers(memory.matches([1])) == [(2, 1)]


def indexed(tokens: list[int]) -> NgramIndex:
    index = NgramIndex()
    if len(tokens) > 1:
        index.add(tokens, 1, len(tokens))
    return index


def test_a_text_does_not_agree_with_its_own_end() -> None:
    assert indexed([1, 2]).matches([1, 2]) == []


def test_a_text_is_indexed_a_bounded_part_at_a_time() -> None:
    tokens = [1, 2, 3, 4, 1, 2, 3]
    drafter, costs = NgramDrafter(tokens, OutputHistory()), PairModel()

    def guesses() -> list[int]:
        tree = Tree(tokens, GreedyPicker(), costs.calibration)
        return [node.token for node in drafter.extend(tree, tree.root, 2, 0.0)]

    drafter.index_new_tokens(max_tokens=2)
    assert drafter._num_indexed == 3
    assert guesses() == [4, 1], "what is new is indexed right before a guess"
    tokens += [7, 3, 8, 1, 2, 3]
    assert guesses() == [7, 3]


def searched(tokens: list[int], context: list[int]) -> list[tuple[int, int]]:
    """What a plain search finds: positions after three tokens that match, or else two or one, the newest first."""
    for shortest in (3, 2, 1):
        found = []
        for position in range(len(tokens) - 1, 0, -1):
            length = 0
            while length < min(position, len(context)) and tokens[position - 1 - length] == context[-1 - length]:
                length += 1
            if length >= shortest and len(context) >= shortest:
                found.append((position, length))
        if found:
            return found[:16]
    return []


@given(st.lists(st.integers(0, 2), min_size=1, max_size=34), st.lists(st.integers(0, 2), min_size=1, max_size=6))
def test_it_finds_what_a_search_finds(tokens: list[int], context: list[int]) -> None:
    found = [(match.position, match.length) for match in indexed(tokens).matches(context)]

    assert found == searched(tokens, context)


@given(st.integers(), st.lists(st.integers(1, 150), min_size=1, max_size=5))
def test_long_texts_are_searched_alike_in_whatever_pieces_they_come(seed: int, pieces: list[int]) -> None:
    chance = random.Random(seed)  # in such a text no three tokens occur often
    one: list[int] = [0]
    other = [12, 12, 12]  # in turns with it
    index = NgramIndex()
    for piece in pieces:
        for tokens in (one, other):
            begin = len(tokens)
            tokens += [chance.choice((chance.randrange(12), chance.randrange(2**31))) for _ in range(piece)]
            middle = chance.randrange(begin, len(tokens) + 1)
            for start, end in ((begin, middle), (middle, len(tokens))):
                if start < end:
                    index.add(tokens, start, end)

    for _ in range(8):
        context = [chance.randrange(12) for _ in range(chance.randrange(3, 6))]
        found = index.matches(context)
        expected = {(id(tokens), *one) for tokens in (one, other) for one in searched(tokens, context)}
        longest = max((length for _, _, length in expected), default=0)
        if longest >= 3:
            expected = {one for one in expected if one[2] >= 3}
            assert {(id(match.tokens), match.position, match.length) for match in found} == expected
        assert max((match.length for match in found), default=0) == longest


def test_only_the_newest_of_many_positions_with_the_same_three_tokens_vote() -> None:
    common, rare = [1, 2, 3], [9, 1, 2, 3, 5]
    lens = []
    for count in (10, 20):
        tokens = [*rare, *(token for index in range(count) for token in (100 + index, *common)), 8]
        lens.append([match.length for match in indexed(tokens).matches([9, *common])])

    assert lens == [[3] * 10 + [4], [3] * 16]
    assert MAX_MATCH == 16


def test_a_position_is_looked_for_among_the_64_newest_of_its_place_in_the_table() -> None:
    # All of these tokens hash to the first of 512 places, and the table has fewer.
    tokens = [token for token in range(60_000) if _hash([token]) < 2**23]
    sought = tokens[0]

    found = [indexed([*tokens[: 1 + others], 0]).matches([sought]) for others in (63, 64)]

    assert [len(matches) for matches in found] == [1, 0]


def test_answers_that_grow_in_turns_take_no_more_than_a_hundred_bytes_a_token() -> None:
    """A server decodes many answers at once, so each token begins a new segment of the index."""
    history, chance = OutputHistory(), random.Random(1)
    tracemalloc.start()
    try:
        for _ in range(100):
            growing = [history.begin() for _ in range(16)]
            for _ in range(12):
                for one in growing:
                    history.add(one, [chance.randrange(1000, 50_000)])
        del growing, one
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()

    assert history.num_tokens == 100 * 16 * 11
    assert used / history.num_tokens < 100
