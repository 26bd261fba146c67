"""The memory of past answers: found by what came before, bounded, and never one's own words."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specbranch.core.ngram import LENGTHS, HistoryBudget, OutputHistory, PastOutput


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
