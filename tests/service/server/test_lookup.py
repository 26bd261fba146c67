"""Lookups and the draft thread's turns, without sockets and threads: every step under control."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from specbranch.core.distribution import Distribution
from specbranch.core.round import AcceptanceHint, Signal
from specbranch.engines.base import Row
from specbranch.errors import EngineError, EngineFull
from specbranch.service.server.draft_runner import DraftRunner
from specbranch.service.server.draft_session import State
from specbranch.service.server.handler import RequestHandler
from specbranch.service.server.recorder import EventSink
from specbranch.service.server.store import SessionStore
from specbranch.service.server.timeline_recorder import TimelineRecorder
from specbranch.service.wire.messages import (
    VERSION,
    DraftReply,
    ErrorReply,
    Hello,
    OpenSequences,
    Reply,
    Request,
    Rest,
    StatsReply,
    StatsRequest,
    StepRequest,
    StepRow,
    Welcome,
    WireHint,
    encode,
    pack_tokens,
)
from specbranch.service.wire.payloads import Digest
from specbranch.simulation.scripted import ScriptedEngine
from tests.service.harness import DRAFT, VOCAB, wait_for


class Bench:
    """A service on a table: a clock that is turned by hand."""

    def __init__(
        self, engine: ScriptedEngine | None = None, max_sessions: int = 8, timeline: TimelineRecorder | None = None
    ) -> None:
        self.now_s = 100.0
        self.client = b"me"  # who asks, unless somebody else is named
        self.engine = engine or ScriptedEngine(DRAFT)
        self.store = SessionStore(max_sessions, 10_000)
        observer = EventSink(timeline)
        self.runner = DraftRunner(self.engine, self.store, clock=lambda: self.now_s, observer=observer, prefill_chunk=4)
        self.handler = RequestHandler(self.engine, self.store, self.runner, observer, clock=lambda: self.now_s)

    def ask(self, request: Request, client: bytes | None = None) -> list[Reply]:
        return [reply for _, reply in self.handler.handle(client or self.client, [encode(request)])]

    def open(self, *texts: list[int], planner: str = "pearl", namespace: bytes = b"ours", **settings: int) -> None:
        chosen: dict[str, str | int | float | bool] = {"gamma": 3, **settings}
        assert (
            self.ask(OpenSequences(namespace, planner, chosen, "confidence", [pack_tokens(text) for text in texts]))
            == []
        )

    def step(
        self,
        text: list[int],
        *new: int,
        round: int = 1,
        wait_ms: float = 0.0,
        namespace: bytes = b"ours",
        sent: int = 0,
        hint: WireHint | None = None,
        taken: list[int] | None = None,
    ) -> list[Reply]:
        before = Digest(text)
        row = StepRow(before.name, list(new), before.extend(new).name, sent, hint, taken)
        return self.ask(StepRequest(round, namespace, wait_ms, [row]))

    def work(self, turns: int = 20) -> None:
        for _ in range(turns):
            self.runner.run_step()


def likely(text: list[int]) -> int:
    return DRAFT.distribution(tuple(text)).ids[0]


def test_an_unknown_text_is_asked_for_and_then_drafted() -> None:
    bench = Bench()
    assert bench.step([1, 2], 3) == [DraftReply(1, [None])]
    bench.open([1, 2, 3])
    bench.work()
    next_token = likely([1, 2, 3])
    (reply,) = bench.step([1, 2, 3], next_token, round=2)

    assert isinstance(reply, DraftReply)
    assert reply.rows == [[likely([1, 2, 3, next_token]), likely([1, 2, 3, next_token, likely([1, 2, 3, next_token])])]]
    assert bench.handler.counts.unknown == 1


@pytest.mark.parametrize(
    ("signal", "drafted"), [(Signal.NONE, 0), (Signal.SOME, 0), (Signal.ALL, 3), (None, 0)], ids=str
)
def test_what_the_target_foresees_cuts_the_submission(signal: Signal | None, drafted: int) -> None:
    """At this bar the draft is never sure enough by itself; told that all will stand, it submits all it has."""
    bench = Bench()
    sure: dict[str, str | int | float | bool] = {"gamma": 3, "confidence": 1.0}
    bench.ask(OpenSequences(b"ours", "specbranch", sure, "hrad", [pack_tokens([1, 2, 3])]))
    bench.work()
    hint = None if signal is None else WireHint(int(signal))
    (reply,) = bench.step([1, 2, 3], likely([1, 2, 3]), hint=hint)

    assert isinstance(reply, DraftReply) and reply.rows[0] is not None
    assert len(reply.rows[0]) == drafted
    assert bench.handler.counts.hints == (signal is not None)
    begun = bench.store.snapshot()[0].core.round
    assert begun.hint == (None if signal is None else AcceptanceHint(signal))


@pytest.mark.parametrize("has_recurring_noise", [False, True])
def test_an_answer_that_may_be_tested_by_its_own_noise_is_not_remembered(has_recurring_noise: bool) -> None:
    """The same request sent again would meet its own first answer, and test it with the numbers that made it."""
    bench = Bench()
    text, answer = [1, 2, 3], [7, 8, 9, 10, 11]
    bench.open(text, planner="budget", uses_text=False, cost_aware=False)
    for token in answer:
        before = Digest(text)
        row = StepRow(before.name, [token], before.extend([token]).name, 0, has_recurring_noise=has_recurring_noise)
        bench.ask(StepRequest(1, b"ours", 0.0, [row]))
        text = [*text, token]
    bench.work()

    memory = bench.handler.lookup.tenants.costs(b"ours").history
    assert [match.length for match in memory.matches(answer[:3])] == ([] if has_recurring_noise else [3])


def test_another_namespace_cannot_reach_a_text() -> None:
    bench = Bench()
    bench.open([1, 2, 3], namespace=b"ours")

    assert bench.step([1, 2, 3], 4, namespace=b"theirs") == [DraftReply(1, [None])]


def test_equal_requests_share_one_draft() -> None:
    bench = Bench()
    bench.open([1, 2, 3])
    bench.work()
    first = bench.step([1, 2, 3], 4)
    second = bench.step([1, 2, 3], 4)

    assert first == second
    assert len(bench.store) == 1
    assert bench.handler.counts.unknown == 0


def test_a_text_opened_twice_keeps_its_draft() -> None:
    bench = Bench()
    bench.open([1, 2, 3])
    bench.work()
    session = bench.store.snapshot()[0]
    bench.open([1, 2, 3])

    assert bench.store.snapshot() == [session]
    assert bench.handler.counts.opened == 1


def test_a_planner_may_hold_an_answer_back_until_the_draft_is_long_enough() -> None:
    bench = Bench()
    bench.open([1, 2, 3], planner="sps")
    assert bench.step([1, 2, 3], 4, wait_ms=50) == []
    assert bench.handler.next_deadline_s() == pytest.approx(100.05)
    assert bench.handler.answer_ready() == []
    bench.work()
    ((client, reply),) = bench.handler.answer_ready()

    assert client == b"me"
    assert isinstance(reply, DraftReply) and reply.rows[0] is not None and len(reply.rows[0]) == 3
    assert bench.handler.next_deadline_s() is None


def test_no_target_waits_for_a_draft_that_has_a_long_text_yet_to_read() -> None:
    bench = Bench()
    text = [1, 2, 3, 4] * 12
    bench.open(text, planner="sps")
    bench.work(turns=1)
    assert bench.step(text, 5, wait_ms=50) == [DraftReply(1, [[]])]
    bench.work(turns=20)  # now it has read all

    assert bench.step([*text, 5], 6, round=2, wait_ms=50) == []


def test_a_planner_that_never_drafts_has_nothing_read() -> None:
    bench = Bench()
    text = [1, 2, 3, 4] * 12
    bench.ask(OpenSequences(b"ours", "none", {}, "confidence", [pack_tokens(text)]))
    bench.work()
    bench.step(text, 5, wait_ms=50)
    bench.work()

    assert bench.engine.num_tokens == 0


def test_at_the_deadline_the_answer_goes_out_without_a_draft() -> None:
    bench = Bench()
    bench.open([1, 2, 3], planner="sps")
    bench.step([1, 2, 3], 4, wait_ms=50)
    assert bench.handler.answer_overdue() == []
    bench.now_s += 0.06

    assert bench.handler.answer_overdue() == [(b"me", DraftReply(1, [[]]))]
    assert bench.handler.counts.overdue == 1


def test_a_client_in_a_hurry_is_answered_at_once() -> None:
    bench = Bench()
    bench.open([1, 2, 3], planner="sps")

    assert bench.step([1, 2, 3], 4, wait_ms=0) == [DraftReply(1, [[]])]


def test_a_newer_step_takes_the_place_of_one_that_still_waits() -> None:
    bench = Bench()
    bench.open([1, 2, 3], planner="sps")
    bench.step([1, 2, 3], 4, round=1, wait_ms=50)
    session = bench.store.snapshot()[0]
    bench.step([1, 2, 3, 4], 5, round=2, wait_ms=50)
    bench.work()
    answers = bench.handler.answer_ready()

    assert not session.is_target_waiting
    assert [reply.round for _, reply in answers if isinstance(reply, DraftReply)] == [2]


def test_the_oldest_session_is_forgotten_first_and_its_handles_are_closed() -> None:
    bench = Bench(max_sessions=2)
    bench.open([1], [2], [3])
    bench.work()

    assert len(bench.store) == 2
    assert bench.store.num_evictions == 1
    assert bench.engine.num_handles == 2
    assert bench.step([1], 5) == [DraftReply(1, [None])]


def test_a_text_that_the_draft_model_cannot_read_is_remembered_and_left_alone() -> None:
    """It would be sent again with every step otherwise."""
    bench = Bench()
    bench.open([1, VOCAB + 7])
    bench.work()
    assert bench.step([1, VOCAB + 7], 3) == [DraftReply(1, [[]], undraftable=[0])]
    bench.open([4, 5])
    bench.work()
    assert bench.step([4, 5], VOCAB) == [DraftReply(1, [[]], undraftable=[0])]
    bench.work()

    assert bench.store.undrafted.counts() == {"too_long": 0, "foreign_token": 2, "no_room": 0}
    assert bench.engine.num_handles == 0


def test_a_text_too_long_for_the_cache_is_counted_and_the_first_one_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(with_cache_of(100))
    bench.open([1] * 36)
    bench.work()
    assert bench.step([1] * 36, 2) == [DraftReply(1, [[]], undraftable=[0])], "it has grown too long"
    bench.open([3] * 40, namespace=b"theirs")
    bench.work()

    assert bench.store.undrafted.counts() == {"too_long": 2, "foreign_token": 0, "no_room": 0}
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "a text of 37 tokens is not drafted for: the draft's KV cache has room for texts of 36; start the draft with a "
        "larger --cache-tokens; further ones are only counted"
    ]
    assert [undrafted_of(bench, namespace) for namespace in (b"ours", b"theirs", b"others")] == [
        (1, 0, 0),
        (1, 0, 0),
        (0, 0, 0),
    ]
    assert bench.engine.num_handles == 0


def test_every_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(with_cache_of(100))
    for _ in range(2):
        bench.open([1] * 90)
        bench.open([1, VOCAB])
        bench.open([2, VOCAB + 1])

    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "KV cache" in said[0] and "target's vocabulary" in said[1]


def test_a_text_that_made_way_for_another_is_counted_when_its_target_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(max_sessions=1)
    bench.open([1, 2])
    bench.open([3, 4], namespace=b"theirs")
    bench.open([5, 6], namespace=b"theirs")
    assert bench.store.num_evictions == 2
    assert undrafted_of(bench, b"ours") == (0, 0, 0), "it may have ended"
    assert bench.step([1, 2], 3) == bench.step([1, 2], 3) == [DraftReply(1, [None])]

    assert undrafted_of(bench, b"ours") == (0, 0, 1)
    assert undrafted_of(bench, b"theirs") == (0, 0, 0)
    assert "others needed its room" in caplog.text


def test_a_text_that_lost_the_cache_in_a_step_without_room_is_counted_when_its_target_goes_on() -> None:
    bench = Bench(FullEngine(9, EngineFull))
    bench.open([1, 2])
    bench.work(1)
    bench.step([1, 2], 3)

    assert undrafted_of(bench, b"ours") == (0, 0, 1)
    assert bench.store.num_evictions == 1


def with_cache_of(max_tokens: int) -> ScriptedEngine:
    engine = ScriptedEngine(DRAFT)
    engine.info = replace(engine.info, max_tokens=max_tokens)
    return engine


def undrafted_of(bench: Bench, namespace: bytes) -> tuple[int, int, int]:
    """What a target hears of its texts: too long, with foreign tokens, without room."""
    (reply,) = bench.ask(StatsRequest(1, namespace))
    assert isinstance(reply, StatsReply)
    return reply.too_long, reply.foreign_token, reply.no_room


def test_hello_tells_model_and_version() -> None:
    bench = Bench()

    assert bench.ask(Hello(VERSION, 5)) == [Welcome(VERSION, 5, "scripted", VOCAB)]
    (refusal,) = bench.ask(Hello(VERSION + 1, 6))
    assert isinstance(refusal, ErrorReply) and "update the older one" in refusal.reason


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (OpenSequences(b"n", "perl", {}, "confidence", [pack_tokens([1])]), "did you mean 'pearl'"),
        (OpenSequences(b"n", "pearl", {"gama": 1}, "confidence", [pack_tokens([1])]), "did you mean 'gamma'"),
        (
            OpenSequences(b"n", "specbranch", {"confidence": "high"}, "confidence", [pack_tokens([1])]),
            "SpecbranchSettings.confidence is 'high'; give a number",
        ),
        (OpenSequences(b"n", "pearl", {}, "tarot", [pack_tokens([1])]), "no predictor is called"),
    ],
)
def test_a_bad_setting_is_refused_with_its_advice(request_: Request, reason: str) -> None:
    bench = Bench()
    (refusal,) = bench.ask(request_)

    assert isinstance(refusal, ErrorReply) and reason in refusal.reason
    assert bench.handler.counts.refused == 1


def test_messages_of_several_frames_and_nonsense_are_refused() -> None:
    bench = Bench()
    for frames in ([b""], [b"\xff\xff"], [encode(Hello(VERSION, 1)), b"more"], []):
        ((_, refusal),) = bench.handler.handle(b"me", frames)
        assert isinstance(refusal, ErrorReply)
    assert bench.handler.counts.refused == 4


def test_the_row_limit_goes_first_to_awaited_and_then_to_likely_texts() -> None:
    bench = Bench(ScriptedEngine(DRAFT, row_limit=2))
    bench.open([1], [2], [3])
    bench.open([4], planner="sps")
    bench.step([4], 5, wait_ms=1000)
    bench.runner.run_step()

    assert bench.runner.counts.rows == 2
    awaited = bench.store.find((b"ours", Digest([4, 5]).name))
    assert awaited is not None and awaited.core.tree.root.distribution is not None


def test_a_long_text_is_read_in_pieces_between_which_others_are_served() -> None:
    bench = Bench()
    bench.open(list(range(20)))
    turns = 0
    session = bench.store.snapshot()[0]
    while session.core.tree.root.distribution is None:
        bench.runner.run_step()
        turns += 1

    assert turns == 5


def test_texts_are_read_one_after_the_other_while_others_draft() -> None:
    bench = Bench()
    bench.open([1, 2])
    bench.work(1)
    bench.open(list(range(20)), list(range(1, 21)))
    sizes = []
    for _ in range(14):
        before = bench.engine.num_tokens
        bench.runner.run_step()
        sizes.append(bench.engine.num_tokens - before)

    # Beside the session that drafts only a quarter of a piece is read; once it rests, whole pieces.
    assert sizes[:2] == [1 + 1, 1 + 1]
    assert max(sizes) == 4
    assert all(session.core.tree.root.distribution is not None for session in bench.store.snapshot())


def test_a_verdict_between_planning_and_running_does_no_harm() -> None:
    bench = Bench()
    bench.open([1, 2])
    bench.work(2)
    session = bench.store.snapshot()[0]
    request = bench.runner.planner._row_request(session, bench.now_s)
    assert request is not None
    request.granted = list(request.nodes)
    bench.step([1, 2], 49)
    feeds = bench.runner.planner._engine_rows(request, 4)

    assert [feed.row.tokens for feed in feeds] == [(49,)]


class FullEngine(ScriptedEngine):
    """Refuses a number of steps."""

    def __init__(self, refusals: int, error: type[EngineError]) -> None:
        super().__init__(DRAFT)
        self.refusals = refusals
        self._error = error

    def run(self, rows: list[Row]) -> list[object]:  # type: ignore[override]
        if self.refusals:
            self.refusals -= 1
            raise self._error("no room")
        return super().run(rows)  # type: ignore[return-value]


def test_a_full_engine_makes_room_by_forgetting_the_oldest_and_goes_on() -> None:
    bench = Bench(FullEngine(1, EngineFull))
    bench.open([1])
    bench.open([2])
    bench.work()

    assert bench.runner.counts.failed_steps == 1
    assert len(bench.store) == 1
    assert bench.store.snapshot()[0].core.tree.root.distribution is not None


def test_a_session_whose_step_fails_otherwise_is_forgotten_and_starts_anew() -> None:
    bench = Bench(FullEngine(1, EngineError))
    bench.open([1])
    bench.runner.run_step()
    assert len(bench.store) == 0
    assert bench.runner.faults.count == 1
    bench.open([1])
    bench.work()

    assert bench.store.snapshot()[0].core.tree.root.distribution is not None


def test_the_targets_step_time_is_learned_from_the_pauses_between_steps() -> None:
    bench = Bench()
    bench.open([1, 2])
    bench.step([1, 2], 3)
    bench.now_s += 0.25
    bench.step([1, 2, 3], 4)
    cost = bench.store.snapshot()[0].core.round.costs.target.cost

    assert cost is not None and cost.at(1) == pytest.approx(0.25)


def crowded_bench() -> Bench:
    """An engine that has room for the texts of five tokens at rest."""
    engine = ScriptedEngine(DRAFT)
    engine.info = replace(engine.info, idle_cache_tokens=5)
    return Bench(engine)


def test_a_session_whose_target_has_gone_on_without_it_leaves_the_cache_and_comes_back() -> None:
    bench = crowded_bench()
    bench.open([1, 2, 3, 4, 5, 6])
    bench.open([9, 8, 7])
    bench.work()
    old = bench.store.find((b"ours", Digest([1, 2, 3, 4, 5, 6]).name))
    assert old is not None

    def num_handles() -> int:
        return old.tree_cache.num_handles

    assert num_handles()
    text = [9, 8, 7]
    for _ in range(40):
        text.append(likely(text))
        bench.step(text[:-1], text[-1])
        bench.work(2)

    assert old.is_idle and bench.runner.counts.cleared == 1
    assert num_handles() == 0
    assert not old.is_dropped, "its text is still known"
    next_token = likely([1, 2, 3, 4, 5, 6])
    bench.step([1, 2, 3, 4, 5, 6], next_token)
    bench.work()
    assert num_handles()
    after = [1, 2, 3, 4, 5, 6, next_token, likely([1, 2, 3, 4, 5, 6, next_token])]
    (reply,) = bench.step(after[:-1], after[-1])
    assert isinstance(reply, DraftReply) and reply.rows[0] and reply.rows[0][0] == likely(after)


def test_a_session_that_its_target_leaves_out_gets_no_rows_until_it_is_back() -> None:
    """Most likely the request has ended. One that was not decoded yet is still read by both sides."""
    bench = Bench()
    texts = [[1, 2, 3], [9, 8, 7], [4, 5, 6]]
    for text in texts:
        bench.open(text)
    left, _, prompt = (bench.store.find((b"ours", Digest(text).name)) for text in texts)
    assert left is not None and prompt is not None
    bench.step(texts[0], likely(texts[0]))
    for _ in range(6):
        texts[1].append(likely(texts[1]))
        bench.step(texts[1][:-1], texts[1][-1])
    bench.work(1)

    assert left.is_paused and not prompt.is_paused and not left.is_idle
    bench.runner.notify(left)
    rows = left.core.stats.rows
    bench.work()
    assert left.core.stats.rows == rows
    text = [*texts[0], likely(texts[0])]
    bench.step(text, likely(text))
    bench.work()
    assert left.core.stats.rows > rows


def test_a_client_that_rests_gets_no_rows_until_its_next_step() -> None:
    bench = Bench()
    text = [1, 2, 3]
    bench.open(text, planner="sps", gamma=32)
    bench.open([9, 8, 7], planner="sps", gamma=32)
    bench.step(text, likely(text), wait_ms=1000.0)
    bench.work(2)
    before = bench.runner.counts.rows
    assert bench.ask(Rest(b"ours")) == []
    bench.work()

    assert before > 0 and bench.runner.counts.rows == before
    assert not bench.handler.answer_ready() and bench.handler.next_deadline_s() is None, "nobody waits for the reply"
    text.append(likely(text))
    bench.step(text, likely(text), wait_ms=1000.0)
    bench.work()
    assert bench.runner.counts.rows > before


def test_a_session_stays_while_another_target_works() -> None:
    """Each target has its own step counter: one that is slow is not taken for one that has ended."""
    bench = crowded_bench()
    bench.open([1, 2, 3, 4, 5, 6])
    bench.work()
    old = bench.store.find((b"ours", Digest([1, 2, 3, 4, 5, 6]).name))
    text = [9, 8, 7]
    bench.ask(OpenSequences(b"ours", "pearl", {"gamma": 3}, "confidence", [pack_tokens(text)]), client=b"other")
    for _ in range(40):
        text.append(likely(text))
        before = Digest(text[:-1])
        row = StepRow(before.name, text[-1:], before.extend(text[-1:]).name, 0)
        bench.ask(StepRequest(1, b"ours", 0.0, [row]), client=b"other")
        bench.work(2)

    assert old is not None and old.tree_cache.num_handles and not old.is_idle


def test_an_answer_to_one_client_does_not_stop_the_wait_of_another_for_the_same_session() -> None:
    """Two engines share a namespace. Both wait for one session, and the second for another one as well."""
    notified: list[bool] = []
    bench = Bench()
    bench.runner._notify = lambda: notified.append(True)
    bench.open([1, 2, 3], planner="sps")
    bench.open([4, 5, 6], planner="sps", gamma=4)
    shared, other = row_of([1, 2, 3], 7), row_of([4, 5, 6], 8)
    assert bench.ask(StepRequest(1, b"ours", 100.0, [shared]), client=b"a") == []
    assert bench.ask(StepRequest(1, b"ours", 100.0, [shared, other]), client=b"b") == []
    answered: list[bytes] = []
    while b"b" not in answered:
        bench.work(1)
        answered += [client for client, _ in bench.handler.answer_ready()]
        if answered == [b"a"]:
            unlikely = DRAFT.distribution((1, 2, 3, 7)).ids[-1]
            assert bench.ask(StepRequest(2, b"ours", 100.0, [row_of([1, 2, 3, 7], unlikely)]), client=b"a") == []
    notified.clear()
    while not (answers := bench.handler.answer_ready()):
        bench.work(1)

    ((client, reply),) = answers
    assert client == b"a" and notified
    assert isinstance(reply, DraftReply) and reply.rows[0] is not None and len(reply.rows[0]) == 3


def test_a_session_that_falls_far_behind_while_it_is_awaited_goes_on_with_its_prefill() -> None:
    """Others needed the cache: the target waits no longer, and the prefill goes on all the same."""
    bench = Bench()
    sequence = [1 + number % 40 for number in range(100)]
    bench.open(sequence, planner="sps")
    bench.step(sequence, 7)
    bench.work(40)
    assert bench.step([*sequence, 7], 8, round=2, wait_ms=100.0) == []
    (session,) = bench.store.snapshot()
    session.tree_cache.close()
    ((_, reply),) = bench.handler.answer_ready()
    assert reply == DraftReply(2, [[]]) and session.state is State.PREFILLING
    before = session.num_unprefilled
    bench.work(3)

    assert session.num_unprefilled < before


def row_of(sequence: list[int], *new: int) -> StepRow:
    before = Digest(sequence)
    return StepRow(before.name, list(new), before.extend(new).name, 0)


def test_the_compute_thread_ends_when_its_last_turn_took_the_news_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Bench().runner
    work = runner.run_step
    stopper = threading.Thread(target=runner.stop, daemon=True)

    def work_after_the_end() -> bool:
        stopper.start()
        while runner._news.empty():  # until `stop` has woken this thread, which did not wait yet
            time.sleep(0.001)
        return work()

    monkeypatch.setattr(runner, "run_step", work_after_the_end)
    runner.start()
    wait_for(lambda: not runner.is_alive)


class SlowEngine(ScriptedEngine):
    """Takes a second for the first row of a step, a tenth for each further one, and a hundredth for other tokens."""

    def __init__(self, bench: Bench, *, fails: bool = False) -> None:
        super().__init__(DRAFT)
        self._bench = bench
        self._fails = fails

    def run(self, rows: Sequence[Row]) -> list[Distribution]:
        if self._fails:
            raise EngineError("out of order")
        num_tokens, num_outputs = sum(len(row.tokens) for row in rows), sum(row.num_outputs for row in rows)
        self._bench.now_s += 1.0 + 0.1 * (num_outputs - 1) + 0.01 * (num_tokens - num_outputs)
        return super().run(
            [Row(row.handle, tuple(token % VOCAB for token in row.tokens), row.num_outputs) for row in rows]
        )


def test_the_times_of_draft_steps_are_known_before_the_first_session() -> None:
    bench = Bench()
    engine = SlowEngine(bench)
    runner = DraftRunner(engine, bench.store, clock=lambda: bench.now_s)
    runner.measure()

    assert runner.cost.cost is not None
    assert runner.cost.cost.at(1) == pytest.approx(1.0)
    assert runner.cost.cost.at(8) == pytest.approx(1.7)
    assert runner.cost.prefill_token_s == pytest.approx(0.01)
    assert engine.num_handles == 0


def test_an_engine_that_fails_before_the_first_session_may_still_serve(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    engine = SlowEngine(bench, fails=True)
    DraftRunner(engine, bench.store).measure()

    assert "could not be timed: out of order" in caplog.text
    assert engine.num_handles == 0
