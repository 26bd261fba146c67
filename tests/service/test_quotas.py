"""One tenant cannot take what belongs to others: turns, waits, rows, room and descriptors are shared and bounded."""

from __future__ import annotations

import itertools
import logging
import queue
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from specbranch.core.distribution import Distribution
from specbranch.core.round import Draft, Stats
from specbranch.engines.base import Row
from specbranch.errors import EngineFull
from specbranch.logs import RateLimitedWarning
from specbranch.service.server.batch import DraftBatch, TenantActivity
from specbranch.service.server.draft_runner import _MAX_FAILURES
from specbranch.service.server.draft_session import DraftSession
from specbranch.service.server.fair_queue import DecayedUsage, FairQueue, Message
from specbranch.service.wire.messages import (
    MAX_FRAME,
    MAX_ROWS,
    MAX_SEQUENCE,
    DraftReply,
    ErrorReply,
    OpenSequences,
    StatsReply,
    StatsRequest,
    StepRequest,
    StepRow,
    encode,
    pack_tokens,
)
from specbranch.service.wire.payloads import Digest
from specbranch.simulation.scripted import ScriptedEngine
from tests.service.harness import DRAFT, VOCAB
from tests.service.server.test_lookup import Bench, likely


def message(client: bytes, size: int = 10) -> Message:
    return Message(client, b"", [b"x" * size])


def served(turns: FairQueue) -> list[bytes]:
    clients = []
    while (one := turns.pop()) is not None:
        clients.append(one.client)
    return clients


def row_of(text: list[int], *new: int) -> StepRow:
    before = Digest(text)
    return StepRow(before.name, list(new), before.extend(new).name, 0)


def in_turn(bench: Bench) -> list[DraftSession]:
    return list(chain(*bench.runner.planner._select_sessions()))


def namespaces(bench: Bench) -> list[bytes]:
    return [session.namespace for session in bench.store.snapshot()]


def test_what_was_used_counts_half_after_its_half_life_and_strangers_count_as_told() -> None:
    usage = DecayedUsage(2.0, newcomer=8.0)
    assert usage.get(b"a", 0.0) == 8.0
    usage.add(b"a", 4.0, 0.0)

    assert usage.get(b"a", 0.0) == 12.0
    assert usage.get(b"a", 2.0) == 6.0
    assert usage.get(b"b", 2.0) == 8.0


def test_only_those_who_used_something_of_late_are_remembered() -> None:
    usage = DecayedUsage(1.0)
    for number in range(2000):
        usage.add(b"%d" % number, 1.0, 0.0)

    assert usage.get(b"0", 0.0) == 0.0
    assert usage.get(b"1999", 0.0) == 1.0
    assert len(usage._used) == 1024


def test_clients_take_turns_and_who_took_least_time_goes_first() -> None:
    turns = FairQueue(clock=lambda: 0.0)
    for client in (b"many", b"many", b"many", b"few"):
        turns.push(message(client))
    first = turns.pop()
    assert first is not None and first.client == b"many", "nobody is known yet: the first to come"
    turns.charge(b"many", 0.5)

    assert served(turns) == [b"few", b"many", b"many"]


def test_a_client_that_takes_little_goes_before_strangers_and_they_before_one_that_takes_much() -> None:
    now_s = 0.0
    turns = FairQueue(clock=lambda: now_s)
    turns.charge(b"good", 0.0003)
    turns.charge(b"bad", 10.0)
    now_s = 3.0
    for client in (b"bad", b"new", b"newer", b"good"):
        turns.push(message(client))

    assert served(turns) == [b"good", b"new", b"newer", b"bad"]


def test_messages_beyond_the_room_are_those_of_who_takes_most() -> None:
    turns = FairQueue(clock=lambda: 0.0, max_bytes=10_000)
    turns.push(message(b"good", 100))
    for _ in range(50):
        turns.push(message(b"bad", 1000))
    turns.push(message(b"good", 100))

    assert turns.num_bytes <= 10_000
    assert turns.num_dropped == 50 - served(turns).count(b"bad") > 0
    assert (len(turns), turns.num_bytes) == (0, 0)


def test_a_message_that_others_kept_waiting_for_long_is_dropped_and_one_that_only_lay_there_is_not() -> None:
    now_s = 0.0
    turns = FairQueue(clock=lambda: now_s)
    turns.push(message(b"one"))
    now_s = 3600.0
    assert served(turns) == [b"one"]
    turns.push(message(b"one"))
    turns.charge(b"another", 1.1)
    turns.push(message(b"two"))

    assert served(turns) == [b"two"]
    assert turns.num_dropped == 1


def test_small_messages_are_bounded_by_number() -> None:
    turns = FairQueue(clock=lambda: 0.0, max_messages=8)
    for client in [b"bad"] * 20 + [b"good"] * 2:
        turns.push(message(client))

    assert sorted(served(turns)) == [b"bad"] * 6 + [b"good"] * 2
    assert turns.num_dropped == 14


def test_no_answer_is_held_back_beyond_the_services_own_bound() -> None:
    bench = Bench()
    bench.open([1, 2, 3], planner="sps")
    assert bench.step([1, 2, 3], 4, wait_ms=60_000) == []
    deadline_s = bench.handler.next_deadline_s()

    assert deadline_s == bench.now_s + 1.0


def test_a_text_that_a_thousand_rows_wait_for_is_asked_once_and_all_get_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    bench.open([1, 2, 3], planner="sps")
    bench.work()
    bench.handler.answer_ready()
    assert bench.ask(StepRequest(1, b"ours", 1000.0, [row_of([1, 2, 3], 4)] * MAX_ROWS)) == []
    (session,) = bench.store.snapshot()
    calls: list[None] = []
    propose = session.propose

    def counted() -> Draft | None:
        calls.append(None)
        return propose()

    monkeypatch.setattr(session, "propose", counted)
    bench.handler.answer_ready()
    assert not calls, "nothing has grown since"
    bench.work()
    ((_, reply),) = bench.handler.answer_ready()

    assert len(calls) == 1
    assert isinstance(reply, DraftReply) and len(reply.rows) == MAX_ROWS
    assert reply.rows[0] and reply.rows == [reply.rows[0]] * MAX_ROWS
    assert bench.handler.counts.lookups == 1
    assert not session.is_target_waiting


def test_a_step_whose_client_has_gone_on_is_waited_for_no_more() -> None:
    bench = Bench()
    bench.open([1, 2, 3], [4, 5, 6], planner="sps")
    bench.ask(StepRequest(1, b"ours", 1000.0, [row_of([1, 2, 3], 4)]))
    bench.ask(StepRequest(2, b"ours", 0.0, [row_of([4, 5, 6], 7)]))

    assert not bench.handler._waiting._rows and bench.handler.next_deadline_s() is None


def test_the_tenant_with_most_sessions_forgets_first() -> None:
    bench = Bench(max_sessions=4)
    bench.open([1, 2], namespace=b"good")
    for number in range(20):
        bench.open([3, number], namespace=b"bad")

    assert sorted(namespaces(bench)) == [b"bad"] * 3 + [b"good"]
    assert [session.core.tokens for session in bench.store.snapshot()][1:] == [[3, 17], [3, 18], [3, 19]]


def test_the_tenant_with_most_tokens_forgets_first_even_what_it_has_just_opened() -> None:
    bench = Bench(max_sessions=64)
    bench.open([number % 40 for number in range(400)], namespace=b"good")
    for number in range(4):
        bench.open([number] * 4000, namespace=b"bad")

    assert bench.store.num_tokens == 400 + 2 * 4000
    assert sorted(namespaces(bench)) == [b"bad", b"bad", b"good"]


def test_of_equal_tenants_the_least_recently_used_forgets() -> None:
    bench = Bench(max_sessions=2)
    for namespace in (b"one", b"two"):
        bench.open([1, 2], namespace=namespace)
    bench.step([1, 2], 3, namespace=b"one")
    bench.ask(OpenSequences(b"three", "pearl", {}, "confidence", [pack_tokens([1, 2])]))

    assert namespaces(bench) == [b"one", b"three"]


class Narrow(ScriptedEngine):
    """Has room for a few tokens."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__(DRAFT)
        self.info = replace(self.info, max_tokens=max_tokens)

    def run(self, rows: Any) -> list[Distribution]:
        if self.num_tokens + sum(len(row.tokens) for row in rows) > self.info.max_tokens:
            raise EngineFull("no room")
        return super().run(rows)


def test_where_the_cache_is_full_the_tenant_that_fills_it_loses_its_own() -> None:
    bench = Bench(Narrow(200), max_sessions=64)
    bench.open([1, 2, 3], namespace=b"good")
    bench.work()
    for number in range(6):
        bench.open([number] * 60, namespace=b"bad")
        bench.work(40)

    assert bench.store.num_evictions > 0
    assert namespaces(bench).count(b"good") == 1
    token = likely([1, 2, 3])
    (reply,) = bench.step([1, 2, 3], token, namespace=b"good")
    assert isinstance(reply, DraftReply) and reply.rows[0], "its draft was there all the time"


def test_a_text_that_is_not_drafted_for_is_kept_by_its_name_only() -> None:
    engine = ScriptedEngine(DRAFT)
    engine.info = replace(engine.info, max_tokens=1000)
    bench = Bench(engine)
    text = [number % VOCAB for number in range(5000)]
    bench.open(text)
    assert bench.step(text, 1) == [DraftReply(1, [[]], undraftable=[0])]
    assert bench.step([*text, 1], 2, 3) == [DraftReply(1, [[]], undraftable=[0])]
    (session,) = bench.store.snapshot()

    assert bench.store.num_tokens == len(session.core.tokens) == 4
    assert not bench.store._prefixes._marks
    assert bench.store.undrafted.counts()["too_long"] == 1
    assert bench.handler.counts.unknown == 0


def test_texts_that_never_go_on_leave_nothing_behind() -> None:
    bench = Bench()
    for number in range(100):
        bench.open([1, number % VOCAB, number // VOCAB])
    bench.work()

    costs = bench.handler.lookup.tenants.costs(b"ours")
    assert not costs.history.num_tokens


def test_a_client_cannot_make_up_tenants() -> None:
    bench = Bench(max_sessions=16)
    for number in range(4):
        bench.open([1, 2], namespace=b"%d" % number)
    (refusal,) = bench.ask(OpenSequences(b"4", "pearl", {}, "confidence", [pack_tokens([1, 2])]))

    assert isinstance(refusal, ErrorReply) and "at most 4 namespaces" in refusal.reason
    assert bench.ask(OpenSequences(b"4", "pearl", {}, "confidence", [pack_tokens([1, 2])]), client=b"another") == []
    assert len(bench.store) == 5


def test_a_namespace_belongs_to_the_key_that_its_client_has_and_a_key_is_one_tenant() -> None:
    bench = Bench(max_sessions=3)

    def ask(request: Any, user: bytes) -> list[Any]:
        return [reply for _, reply in bench.handler.handle(user, [encode(request)], user)]

    for user, texts in ((b"good", [[1, 2]]), (b"bad", [[1, 2], [3, 4], [5, 6]])):
        for number, text in enumerate(texts):
            assert ask(OpenSequences(b"prod%d" % number, "pearl", {}, "confidence", [pack_tokens(text)]), user) == []
    (figures,) = ask(StatsRequest(1, b"prod0"), b"bad")

    assert isinstance(figures, StatsReply) and figures.sessions == 0, "its own first, which made way; not the other's"
    assert [session.core.tokens for session in bench.store.snapshot()] == [[1, 2], [3, 4], [5, 6]]
    assert ask(StepRequest(1, b"prod0", 0.0, [row_of([1, 2], 3)]), b"bad") == [DraftReply(1, [None])]
    assert ask(StepRequest(1, b"prod0", 0.0, [row_of([1, 2], 3)]), b"good") != [DraftReply(1, [None])]


def test_the_longest_text_fits_into_a_frame() -> None:
    settings: Any = {"s" * 50 + str(number): "v" * 64 for number in range(16)}
    frame = encode(OpenSequences(b"n" * 64, "p" * 64, settings, "q" * 64, [pack_tokens([1] * MAX_SEQUENCE)]))

    assert len(frame) <= MAX_FRAME


def test_where_planning_takes_long_each_tenant_has_a_turn_and_what_is_decoded_goes_first() -> None:
    bench = Bench(max_sessions=64)
    bench.open([1, 2, 3], namespace=b"good")
    bench.step([1, 2, 3], likely([1, 2, 3]), namespace=b"good")
    for number in range(40):
        bench.open([4, number], namespace=b"bad")
    bench.runner._take_news()
    assert len(in_turn(bench)) == 41, "how long it takes is not known"
    bench.runner.cost.observe(1, 0.002)
    bench.runner.planner._planning_s = 0.0002
    turns = [in_turn(bench) for _ in range(20)]

    assert [len(turn) for turn in turns] == [3] * 20, "one, and a quarter of the ten that there is time for"
    assert all(any(session.namespace == b"good" for session in turn) for turn in turns)
    assert len({session for turn in turns for session in turn}) == 41, "all have their turn"


def test_texts_that_were_only_announced_have_their_turn_beside_many_that_are_decoded() -> None:
    bench = Bench(max_sessions=64)
    for number in range(12):
        bench.client = namespace = b"%d" % number
        bench.open([1, 2, 3], namespace=namespace)
        bench.step([1, 2, 3], likely([1, 2, 3]), namespace=namespace)
    bench.client = b"new"
    bench.open([4, 5], namespace=b"new")
    bench.runner._take_news()
    bench.runner.cost.observe(1, 0.002)
    bench.runner.planner._planning_s = 0.001
    turns = [{session.namespace for session in in_turn(bench)} for _ in range(12)]

    assert {len(turn) for turn in turns} == {5}
    assert all(b"new" in turn for turn in turns)
    assert all(sum(b"%d" % number in turn for turn in turns) == 4 for number in range(12))


def test_planning_is_timed_without_the_engine() -> None:
    bench = Bench()
    plan = bench.runner.planner.plan

    def slow_plan() -> DraftBatch:
        bench.now_s += 0.5
        return plan()

    bench.runner.planner.plan = slow_plan  # type: ignore[method-assign]
    bench.open([1, 2], [3, 4])
    bench.runner.run_step()

    assert bench.runner.planner._planning_s == pytest.approx(0.1 * 0.5 / 4), "two sessions and two rows"


class Lost(ScriptedEngine):
    """Works until it is lost."""

    is_lost = False

    def run(self, rows: Any) -> list[Distribution]:
        if self.is_lost:
            raise RuntimeError("no device")
        return super().run(rows)


def test_an_engine_that_fails_turn_after_turn_is_lost_and_one_that_works_again_is_not() -> None:
    engine = Lost(DRAFT)
    bench = Bench(engine)
    for number in range(2 * _MAX_FAILURES):
        engine.is_lost = number != _MAX_FAILURES - 1
        assert not bench.runner.engine_failed
        bench.open([1, number % VOCAB])
        bench.runner.run_step()

    assert bench.runner.engine_failed


def test_want_of_room_is_no_loss_of_the_engine() -> None:
    class Full(ScriptedEngine):
        def run(self, rows: list[Row]) -> list[Distribution]:  # type: ignore[override]
            raise EngineFull("no room")

    bench = Bench(Full(DRAFT))
    for number in range(2 * _MAX_FAILURES):
        bench.open([1, number % VOCAB])
        bench.runner.run_step()

    assert bench.runner.counts.failed_steps >= _MAX_FAILURES
    assert not bench.runner.engine_failed


def test_refusals_are_logged_once_a_second_cut_and_on_one_line(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    frame = encode(OpenSequences(b"n", "pearl", {}, "x\n" * 32, [pack_tokens([1])]))
    for _ in range(1000):
        list(bench.handler.handle(b"me", [frame]))
    bench.now_s += 1.0
    list(bench.handler.handle(b"me", [frame]))

    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and all(len(line) < 300 and "\n" not in line for line in lines)
    assert lines[1].endswith("(999 more were not logged)")
    assert bench.handler.counts.refused == 1001


def test_what_is_seldom_logged_says_how_much_was_left_out(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 10.0
    warn = RateLimitedWarning(logging.getLogger("specbranch"), lambda: now_s)
    for number in range(5):
        now_s += 0.3
        warn("number %d", number)

    assert [record.getMessage() for record in caplog.records] == ["number 0", "number 4 (3 more were not logged)"]


def test_figures_are_collected_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    calls: list[None] = []
    stats = bench.store.stats

    def counted() -> Stats:
        calls.append(None)
        return stats()

    monkeypatch.setattr(bench.store, "stats", counted)
    for _ in range(10):
        bench.handler.metrics.families()
    bench.now_s += 1.0
    bench.handler.metrics.as_dict()

    assert len(calls) == 2


def test_texts_of_a_tenant_that_is_gone_have_few_turns_while_others_are_there() -> None:
    bench = Bench(max_sessions=64)
    bench.client = b"gone"
    for number in range(40):
        bench.open([4, number], namespace=b"gone")
        bench.step([4, number], likely([4, number]), namespace=b"gone")
    bench.runner._take_news()
    bench.runner.cost.observe(1, 0.002)
    bench.runner.planner._planning_s = 0.0002
    assert len(in_turn(bench)) == 40, "nobody else is there"
    bench.now_s += 2
    bench.client = b"other"
    bench.open([1, 2, 3], namespace=b"here")
    bench.runner._take_news()
    assert [len(in_turn(bench)) for _ in range(5)] == [2] * 5, "an announced one, and one that is waited for"
    runnable = bench.runner.planner.runnable
    (session,) = [one for one in runnable.all() if one.namespace == b"here"]
    runnable.discard(session)
    assert [len(in_turn(bench)) for _ in range(5)] == [2] * 5, "the other one will be back soon"
    bench.now_s += 2
    assert len(in_turn(bench)) == 40, "it is gone as well"


class NoNews:
    """Nothing comes; says how long it was waited for."""

    def __init__(self) -> None:
        self.waited_s: list[float | None] = []

    def empty(self) -> bool:
        return True

    def get(self, timeout: float | None = None) -> Any:
        self.waited_s.append(timeout)
        raise queue.Empty


def slow_to_plan(plan_s: float, num_gone: int, *, is_decoded: bool) -> Bench:
    """A good tenant's text, and others whose tenant is gone and for which planning takes long."""
    bench = Bench(max_sessions=64)
    bench.client = b"gone"
    for number in range(num_gone):
        bench.open([4, number], namespace=b"gone")
        if is_decoded:
            bench.step([4, number], likely([4, number]), wait_ms=0, namespace=b"gone")
    bench.runner._take_news()
    bench.now_s += 2
    bench.client = b"good"
    bench.open([1, 2, 3], namespace=b"good")
    bench.step([1, 2, 3], likely([1, 2, 3]), namespace=b"good")
    bench.runner._take_news()
    bench.runner._news = NoNews()  # type: ignore[assignment]
    bench.runner.cost.observe(1, 0.002)
    bench.runner.planner._planning_s = 0.0005
    request = bench.runner.planner._row_request

    def slow_wish(session: Any, now_s: float) -> Any:
        bench.now_s += plan_s if session.namespace == b"gone" else 0
        return request(session, now_s)

    bench.runner.planner._row_request = slow_wish  # type: ignore[method-assign]
    return bench


@pytest.mark.parametrize("is_decoded", [False, True])
@pytest.mark.parametrize(("plan_s", "pause_s"), [(0.003, 0.048), (0.1, 0.25)])
def test_texts_that_take_long_to_plan_for_and_that_nobody_decodes_have_little_time(
    plan_s: float, pause_s: float, is_decoded: bool
) -> None:
    bench = slow_to_plan(plan_s, 40, is_decoded=is_decoded)
    bench.runner.planner.plan()
    assert {session.namespace for session in in_turn(bench)} == {b"good"}
    bench.now_s += 0.9 * pause_s
    assert {session.namespace for session in in_turn(bench)} == {b"good"}
    bench.runner._wait_for_news()
    assert bench.runner._news.waited_s == [], "the good one has something to do"  # type: ignore[attr-defined]
    runnable = bench.runner.planner.runnable
    (good,) = [session for session in runnable.all() if session.namespace == b"good"]
    runnable.discard(good)
    assert in_turn(bench) == []
    bench.runner._wait_for_news()
    assert bench.runner._news.waited_s == [pytest.approx(0.1 * pause_s)]  # type: ignore[attr-defined]
    bench.now_s += 0.2 * pause_s
    assert {session.namespace for session in in_turn(bench)} == {b"gone"}


def test_planning_for_texts_that_nobody_decodes_ends_after_a_few_milliseconds() -> None:
    bench = slow_to_plan(0.003, 3, is_decoded=False)
    before_s = bench.now_s
    bench.runner.planner.plan()

    assert bench.now_s - before_s == pytest.approx(0.006), "two of the three"


def test_a_tenant_with_slow_steps_counts_as_present_for_two_of_them() -> None:
    heard = TenantActivity()
    for now_s in (0.0, 5.0, 5.001, 10.0, 10.001):
        heard.record(now_s)

    assert heard.is_present(19.9) and not heard.is_present(20.1)
    quick = TenantActivity()
    for number in range(100):
        quick.record(0.01 * number)
    assert quick.is_present(1.9) and not quick.is_present(2.1)


def test_what_was_only_announced_and_what_is_of_the_gone_take_turns() -> None:
    bench = Bench(max_sessions=64)
    for number in range(20):
        bench.client = b"gone"
        bench.open([4, number], namespace=b"gone")
        bench.step([4, number], likely([4, number]), namespace=b"gone")
    bench.runner._take_news()
    bench.now_s += 30
    bench.client = b"new"
    for number in range(20):
        bench.open([5, number], namespace=b"new")
    bench.runner._take_news()
    turns = []
    for _ in range(10):
        bench.runner.planner.runnable.select(4, 0, {b"new"})  # there is no time for them
        turns.append(bench.runner.planner.runnable.select(4, 1, {b"new"})[1][0].namespace)

    assert turns.count(b"gone") == turns.count(b"new") == 5


def test_prompts_of_one_tenant_are_read_in_the_order_in_which_they_came() -> None:
    read: list[int] = []

    class Engine(ScriptedEngine):
        def run(self, rows: Sequence[Row]) -> list[Distribution]:
            read.extend(row.tokens[0] for row in rows if len(row.tokens) > 1)
            return super().run(rows)

    bench = Bench(Engine(DRAFT), max_sessions=64)
    ticks = itertools.count()
    bench.runner._clock = bench.runner.planner._clock = lambda: 100.0 + 0.001 * next(ticks)
    for number in range(6):
        bench.open([number + 1] * 9)
    while bench.runner.run_step():
        pass

    assert len(read) > 6 and read == sorted(read)


def test_texts_that_cannot_be_drafted_for_leave_nothing_behind() -> None:
    bench = Bench(max_sessions=2)
    for number in range(10):
        bench.open([1, VOCAB + number])

    assert len(bench.store) == 2
    assert not bench.store.pop_dropped(), "nobody would come for them"
