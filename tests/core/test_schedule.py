"""Who gets the rows of a draft step: the policy that the service and the simulator share."""

from __future__ import annotations

from specbranch.core.node import Node
from specbranch.core.schedule import Wish, schedule


def wish(name: str, *worths: float, is_awaited: bool = False, num_unread: int = 0) -> Wish[str]:
    nodes = [Node(token, None, 0, 0) for token in range(len(worths))]
    return Wish(session=name, nodes=nodes, worths=worths, is_awaited=is_awaited, num_unread=num_unread)


def granted(wishes: list[Wish[str]], row_limit: int = 64, piece_len: int = 32) -> dict[str, int]:
    return {one.session: len(one.granted) for one in schedule(wishes, row_limit, piece_len).wishes}


def test_the_most_valuable_rows_of_all_sessions_come_first() -> None:
    wishes = [wish("a", 0.9, 0.2), wish("b", 0.5, 0.4), wish("c", 0.1)]

    assert granted(wishes, row_limit=3) == {"a": 1, "b": 2}
    assert wishes[1].granted == list(wishes[1].nodes)


def test_equal_rows_go_to_the_session_that_was_asked_first() -> None:
    assert granted([wish("a", 0.5), wish("b", 0.5)], row_limit=1) == {"a": 1}


def test_a_step_prefills_one_piece_and_the_first_in_line_always_may() -> None:
    wishes = [wish("a", 1.0, num_unread=100), wish("b", 1.0, num_unread=1), wish("c", 1.0, num_unread=4)]

    plan = schedule(wishes, 64, 32)

    assert [one.session for one in plan.wishes] == ["a", "b"]
    assert plan.piece_len == 8, "beside a session that drafts a quarter of a piece"


def test_short_prefills_share_a_piece() -> None:
    wishes = [wish("a", 1.0, num_unread=20), wish("b", 1.0, num_unread=12), wish("c", 1.0, num_unread=2)]

    plan = schedule(wishes, 64, 32)

    assert [one.session for one in plan.wishes] == ["a", "b"]
    assert plan.piece_len == 32, "nobody drafts, so nobody is held up"


def test_a_prefill_that_a_target_waits_for_gets_whole_pieces() -> None:
    wishes = [wish("a", 2.0, is_awaited=True, num_unread=20), wish("b", 0.5)]

    assert schedule(wishes, 64, 32).piece_len == 32
    assert schedule([wish("a", 1.0, num_unread=20), wish("b", 0.5)], 64, 2).piece_len == 1


def test_nothing_wished_is_nothing_granted() -> None:
    assert schedule([], 64, 32).wishes == []
