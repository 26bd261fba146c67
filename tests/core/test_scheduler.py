"""Who gets the rows of a draft step: the policy that the service and the simulator share."""

from __future__ import annotations

from specbranch.core.costs import StepCost
from specbranch.core.node import Node
from specbranch.core.scheduler import MIN_PREFILL_CHUNK, RowRequest, select_rows


def request(name: str, *worths: float, is_awaited: bool = False, num_unread: int = 0) -> RowRequest[str]:
    nodes = [Node(token, None, 0, 0) for token in range(len(worths))]
    return RowRequest(
        session=name, nodes=nodes, priorities=worths, is_target_waiting=is_awaited, num_unprefilled=num_unread
    )


def granted(requests: list[RowRequest[str]], row_limit: int = 64, prefill_chunk: int = 32) -> dict[str, int]:
    return {one.session: len(one.granted) for one in select_rows(requests, row_limit, prefill_chunk).requests}


def test_the_most_valuable_rows_of_all_sessions_come_first() -> None:
    requests = [request("a", 0.9, 0.2), request("b", 0.5, 0.4), request("c", 0.1)]

    assert granted(requests, row_limit=3) == {"a": 1, "b": 2}
    assert requests[1].granted == list(requests[1].nodes)


def test_equal_rows_go_to_the_session_that_was_asked_first() -> None:
    assert granted([request("a", 0.5), request("b", 0.5)], row_limit=1) == {"a": 1}


def test_a_step_prefills_one_piece_and_the_first_in_line_always_may() -> None:
    requests = [request("a", 1.0, num_unread=100), request("b", 1.0, num_unread=1), request("c", 1.0, num_unread=4)]

    plan = select_rows(requests, 64, 32)

    assert [one.session for one in plan.requests] == ["a", "b"]
    assert plan.prefill_chunk == 8, "beside a session that drafts a quarter of a piece"


def test_short_prefills_share_a_piece() -> None:
    requests = [request("a", 1.0, num_unread=20), request("b", 1.0, num_unread=12), request("c", 1.0, num_unread=2)]

    plan = select_rows(requests, 64, 32)

    assert [one.session for one in plan.requests] == ["a", "b"]
    assert plan.prefill_chunk == 32, "nobody drafts, so nobody is held up"


def test_a_prefill_that_a_target_waits_for_gets_whole_pieces() -> None:
    requests = [request("a", 2.0, is_awaited=True, num_unread=20), request("b", 0.5)]

    assert select_rows(requests, 64, 32).prefill_chunk == 32
    assert select_rows([request("a", 1.0, num_unread=20), request("b", 0.5)], 64, 2).prefill_chunk == 1


def test_nothing_wished_is_nothing_granted() -> None:
    assert select_rows([], 64, 32).requests == []


def of(tenant: str, one: RowRequest[str], num_read: float = 0.0) -> RowRequest[str]:
    one.tenant, one.num_prefilled = tenant, num_read
    return one


def test_a_tenant_that_wishes_much_at_most_doubles_the_step() -> None:
    requests = [of("bad", request(f"bad {number}", 0.9)) for number in range(32)] + [of("good", request("good", 0.1))]

    rows = granted(requests, row_limit=8)
    assert rows["good"] == 1 and sum(rows.values()) == 8, "what a step costs is not known"
    for one in requests:
        one.granted.clear()
    plan = select_rows(requests, 64, 32, StepCost(0.010, 0.005))
    assert [one.session for one in plan.requests] == ["bad 0", "bad 1", "bad 2", "bad 3", "good"], "2 rows, 3 more"


def test_where_rows_cost_nothing_nobody_is_bounded_but_by_their_number() -> None:
    requests = [of("bad", request("bad", *[0.9] * 80)), of("good", request("good", 0.1, 0.1))]
    for cost in (StepCost(0.01), None):
        plan = select_rows(requests, 64, 32, cost)
        assert [len(one.granted) for one in plan.requests] == [62, 2]
        for one in requests:
            one.granted.clear()


def test_equal_tenants_have_all_their_rows_and_one_alone_too() -> None:
    cost = StepCost(0.010, 0.010)
    requests = [of(name, request(name, *[0.5] * 8)) for name in "abcd"]
    assert [len(one.granted) for one in select_rows(requests, 64, 32, cost).requests] == [8] * 4

    alone = [of("a", request(str(number), *[0.5] * 8)) for number in range(4)]
    assert [len(one.granted) for one in select_rows(alone, 64, 32, cost).requests] == [8] * 4


def test_a_tenant_alone_for_now_leaves_steps_short_for_those_who_will_be_back() -> None:
    cost = StepCost(0.010, 0.002, per_prefill_token_s=0.001)

    (alone,) = select_rows([request("a", *[0.5] * 20)], 64, 32, cost, is_shared=True).requests
    assert len(alone.granted) == 6, "one row, and five in the time that it takes"
    (alone,) = select_rows([request("a", *[0.5] * 20)], 64, 32, None, is_shared=True).requests
    assert len(alone.granted) == 20, "what a step costs is not known"
    assert select_rows([request("a", 0.5, num_unread=100)], 64, 32, cost, is_shared=True).prefill_chunk == 10


def test_who_is_waited_for_goes_first_within_what_a_tenant_has() -> None:
    requests = [
        of("a", request("a", 0.9, 0.9)),
        of("a", request("a awaited", 1.2, is_awaited=True)),
        of("b", request("b", 0.5)),
    ]

    assert granted(requests, row_limit=2) == {"a awaited": 1, "b": 1}


def test_more_tenants_than_rows_share_by_worth() -> None:
    requests = [of(str(number), request(str(number), 0.1 * number, 0.01)) for number in range(1, 6)]

    assert granted(requests, row_limit=3) == {"3": 1, "4": 1, "5": 1}


def test_text_of_another_tenant_is_read_in_the_time_that_drafting_takes() -> None:
    requests = [of("good", request("good", 0.5)), of("bad", request("bad", 1.0, num_unread=10_000))]

    assert select_rows(requests, 64, 64, StepCost(0.010, 0.005, per_prefill_token_s=0.001)).prefill_chunk == 15, (
        "15 ms for two rows"
    )
    assert (
        select_rows(requests, 64, 64, StepCost(0.010, 0.005, per_prefill_token_s=1.0)).prefill_chunk
        == MIN_PREFILL_CHUNK
    )
    assert select_rows(requests, 64, 32, StepCost(0.010, 0.005)).prefill_chunk == 8


def test_the_tenant_for_whom_least_was_read_reads_first() -> None:
    requests = [
        of("bad", request("bad", 1.0, num_unread=10_000), num_read=500.0),
        of("good", request("good", 1.0, num_unread=30), num_read=3.0),
    ]

    assert [one.session for one in select_rows(requests, 64, 32).requests] == ["good"]


def test_rows_of_others_leave_half_of_the_time_to_text() -> None:
    cost = StepCost(0.010, 0.001, per_prefill_token_s=0.0001)
    rows, text = of("a", request("a", *[0.5] * 50)), of("b", request("b", 1.0, num_unread=2000))

    plan = select_rows([rows, text], 64, 512, cost)

    assert len(rows.granted) == 1 + 5, "its share, and half of the time of two rows"
    assert plan.prefill_chunk in (59, 60), "the other half"
