"""A fault in one session or one message reaches nobody else: neither through settings, nor planners, nor the engine."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specbranch.core.distribution import Distribution
from specbranch.core.node import Node
from specbranch.core.planner import Planner
from specbranch.core.round import Round, Verdict
from specbranch.engines.base import Row
from specbranch.engines.tree_cache import EngineRow
from specbranch.errors import EngineError
from specbranch.service.client.client import DraftClient
from specbranch.service.client.interface import ClientOptions
from specbranch.service.client.stats import ServiceStatus, StatsClient
from specbranch.service.server.draft_session import DraftSession, State
from specbranch.service.wire.messages import (
    DraftReply,
    ErrorReply,
    OpenSequences,
    StatsReply,
    StatsRequest,
    StepRequest,
    StepRow,
    pack_tokens,
)
from specbranch.service.wire.payloads import Digest
from specbranch.simulation.scripted import ScriptedEngine
from tests.service.harness import DRAFT, PATIENCE_S, VOCAB, Walk, free_port, scrape, scripted_service
from tests.service.server.test_lookup import Bench, likely
from tests.service.test_faults import client_for, walk_until_accepted

POISON = (49, 49)


class Faulty(Planner[Any]):
    """A planner like another, until it is asked for the thing that it cannot do."""

    def __init__(self, planner: Planner[Any], broken: str) -> None:
        super().__init__(planner.settings, planner.predictor)
        self._planner = planner
        self._broken = broken

    def submit(self, round: Round) -> Sequence[Node] | None:
        self._fail("submit")
        return self._planner.submit(round)

    def rows_to_run(self, round: Round) -> Sequence[Node]:
        self._fail("rows_to_run")
        return self._planner.rows_to_run(round)

    def learn(self, round: Round, verdict: Verdict) -> None:
        self._fail("learn")
        self._planner.learn(round, verdict)

    def _fail(self, asked: str) -> None:
        if asked == self._broken:
            raise TypeError(f"cannot {asked}")


def draft_of(bench: Bench, text: list[int], namespace: bytes = b"ours") -> DraftSession:
    session = bench.store.find((namespace, Digest(text).name))
    assert session is not None
    return session


def break_planner(session: DraftSession, method: str) -> None:
    session.core._planner = Faulty(session.core._planner, method)


def row_of(text: list[int], *new: int) -> StepRow:
    before = Digest(text)
    return StepRow(before.name, list(new), before.extend(new).name, 0)


def num_faults(bench: Bench) -> int:
    return bench.handler.faults.count + bench.runner.faults.count


def healthy_proposal() -> list[int] | None:
    """What a session gets that is alone in the service."""
    bench = Bench()
    bench.open([1, 2, 3])
    bench.work()
    (reply,) = bench.step([1, 2, 3], likely([1, 2, 3]))
    assert isinstance(reply, DraftReply)
    return reply.rows[0]


@pytest.mark.parametrize("method", ["submit", "rows_to_run", "learn"])
def test_a_planner_that_fails_costs_its_own_session_and_no_other_row_of_the_step(method: str) -> None:
    bench = Bench()
    bench.open([1, 2, 3], [4, 5])
    bench.work()
    broken = draft_of(bench, [4, 5])
    break_planner(broken, method)
    bench.runner.notify(broken)
    bench.work()
    token = likely([1, 2, 3])
    (reply,) = bench.ask(StepRequest(1, b"ours", 0.0, [row_of([4, 5], 6), row_of([1, 2, 3], token)]))
    bench.work()

    assert reply == DraftReply(1, [None, healthy_proposal()])
    assert broken.is_dropped and bench.store.snapshot() == [draft_of(bench, [1, 2, 3, token])]
    assert num_faults(bench) == 1
    assert bench.store.num_tokens == 4
    assert broken.tree_cache.num_handles == 0


def test_a_fault_while_targets_wait_gives_both_their_answers_at_once() -> None:
    bench = Bench()
    bench.open([1, 2, 3], [4, 5], planner="sps")
    for client, row in ((b"bad", row_of([4, 5], 6)), (b"good", row_of([1, 2, 3], 7))):
        assert bench.ask(StepRequest(1, b"ours", 1000.0, [row]), client=client) == []
    break_planner(draft_of(bench, [4, 5, 6]), "submit")
    bench.work()
    answers = dict(bench.handler.answer_ready())

    assert answers[b"bad"] == DraftReply(1, [[]])
    good = answers[b"good"]
    assert isinstance(good, DraftReply) and good.rows[0] is not None and len(good.rows[0]) == 3
    assert bench.handler.next_deadline_s() is None
    assert num_faults(bench) == 1


def test_who_waits_for_a_session_that_fails_is_told_to_look() -> None:
    calls: list[int] = []
    bench = Bench()
    bench.runner._notify = lambda: calls.append(1)
    bench.open([4, 5], planner="sps")
    bench.work()
    bench.step([4, 5], 6, wait_ms=1000)
    break_planner(draft_of(bench, [4, 5, 6]), "rows_to_run")
    bench.work(2)

    assert calls
    assert bench.handler.answer_ready() == [(b"me", DraftReply(1, [[]]))]


def test_a_message_that_meets_a_fault_is_refused_and_the_next_one_is_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench()
    bench.open([1, 2, 3])
    with monkeypatch.context() as patch:
        patch.setattr(bench.store, "stats_of", lambda namespace: 1 / 0)
        for _ in range(3):
            (refusal,) = bench.ask(StatsRequest(1, b"ours"), client=b"other")
            assert isinstance(refusal, ErrorReply) and "failed on this message" in refusal.reason
    (figures,) = bench.ask(StatsRequest(1, b"ours"), client=b"other")

    assert isinstance(figures, StatsReply) and figures.sessions == 1
    assert bench.handler.faults.count == 3 and bench.handler.counts.refused == 0
    assert len(caplog.records) == 1, "one line of each kind is enough"


def test_a_fault_in_one_held_back_answer_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.open([1, 2, 3], [4, 5], planner="sps")
    for client, row in ((b"bad", row_of([4, 5], 6)), (b"good", row_of([1, 2, 3], 7))):
        bench.ask(StepRequest(1, client, 50.0, [row]), client=client)
        text = [4, 5, 6] if client == b"bad" else [1, 2, 3, 7]
        bench.ask(OpenSequences(client, "sps", {"gamma": 3}, "confidence", [pack_tokens(text)]))
        assert bench.ask(StepRequest(2, client, 50.0, [row_of(text, 8)]), client=client) == []
    tenants = bench.handler.lookup.tenants
    answered = tenants.record_reply
    monkeypatch.setattr(
        tenants, "record_reply", lambda namespace, at_s: 1 / 0 if namespace == b"bad" else answered(namespace, at_s)
    )
    bench.now_s += 1
    answers = dict(bench.handler.answer_overdue())

    assert isinstance(answers[b"bad"], ErrorReply)
    assert answers[b"good"] == DraftReply(2, [[]])
    assert bench.handler.next_deadline_s() is None


class Poisoned(ScriptedEngine):
    """Cannot read one text, and is half-way through a step when it finds out."""

    def __init__(self) -> None:
        super().__init__(DRAFT)

    def run(self, rows: Sequence[Row]) -> list[Distribution]:
        distributions = []
        for row in rows:
            text: Any = self._cells[row.handle].state
            if (*text, *row.tokens)[:2] == POISON:
                raise EngineError("not this text")
            distributions += super().run([row])
        return distributions


def test_a_row_that_the_engine_cannot_run_costs_its_own_session_only() -> None:
    bench = Bench(Poisoned(), max_sessions=64)
    innocents = [[number, number + 1] for number in range(1, 40)]
    bench.open(*innocents, namespace=b"innocent")
    bench.work(60)
    handles = [draft_of(bench, text, b"innocent").tree_cache.num_handles for text in innocents]
    for text in innocents[:5]:
        bench.step(text, likely(text), namespace=b"innocent")
    bench.open(list(POISON), namespace=b"poisoned")
    bench.work(10)

    assert len(bench.store) == len(innocents)
    assert num_faults(bench) == 1
    assert [draft_of(bench, text, b"innocent").tree_cache.num_handles for text in innocents[5:]] == handles[5:]
    for text in innocents[:5]:  # they were in the step that failed, and go on from where they stood
        after = [*text, likely(text)]
        (reply,) = bench.step(after, likely(after), namespace=b"innocent")
        assert isinstance(reply, DraftReply) and reply.rows[0]
        expected = [*after, likely(after)]
        for token in reply.rows[0]:
            assert token == likely(expected)
            expected.append(token)


class Forgetful(ScriptedEngine):
    """Loses the last distribution of a step."""

    def run(self, rows: Sequence[Row]) -> list[Distribution]:
        return super().run(rows)[:-1]


def test_an_engine_that_gives_too_few_distributions_costs_the_sessions_of_that_step() -> None:
    bench = Bench(Forgetful(DRAFT))
    bench.open([1], [2])
    bench.work()

    assert len(bench.store) == 0
    assert num_faults(bench) == 2


class NoForks(ScriptedEngine):
    """Cannot fork, and says so as a thing that should not happen."""

    def fork(self, handle: int, length: int) -> int:
        raise KeyError(handle)


def test_a_lender_that_fails_is_forgotten_and_the_borrower_reads_by_itself() -> None:
    bench = Bench(NoForks(DRAFT))
    text = [number % 7 for number in range(20)]
    bench.open(text)
    bench.work()
    bench.open([*text, 8, 9])
    bench.work()

    borrower = draft_of(bench, [*text, 8, 9])
    assert bench.store.snapshot() == [borrower]
    assert borrower.core.tree.root.distribution is not None
    assert bench.runner.counts.borrowed_tokens == 0


def test_a_verdict_that_leaves_nothing_to_run_evicts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between planning and feeding: the session wants no rows any more, which is not a want of room."""
    bench = Bench()
    bench.open([1, 2])
    bench.work()
    bench.open([4, 5], planner="sps")
    bench.step([4, 5], 6, wait_ms=1000)
    planner = bench.runner.planner
    engine_rows = planner._engine_rows

    def give_up_first(*request: Any) -> list[EngineRow]:
        bench.now_s += 2
        bench.handler.answer_overdue()
        bench.step([4, 5, 6], 7)
        return engine_rows(*request)

    monkeypatch.setattr(planner, "_engine_rows", give_up_first)
    bench.runner.run_step()

    assert len(bench.store) == 2 and bench.store.num_evictions == 0


def test_a_token_that_the_draft_does_not_know_never_enters_the_session_that_drafts() -> None:
    bench = Bench()
    bench.open([4, 5])
    bench.work()
    drafting = draft_of(bench, [4, 5])
    assert bench.step([4, 5], 6, VOCAB) == [DraftReply(1, [[]], undraftable=[0])]

    assert drafting.core.tokens == [4, 5] and drafting.is_dropped
    assert draft_of(bench, [4, 5, 6, VOCAB]).state is State.UNDRAFTABLE
    assert len(bench.store) == 1 and bench.store.num_tokens == 1, "a name and the last token are kept of it"


def report(address: str, namespace: bytes) -> StatsReply:
    with contextlib.closing(StatsClient(address, namespace)) as stats_client:
        end_s = time.monotonic() + PATIENCE_S
        while stats_client.poll(1.0) is not ServiceStatus.ANSWERS:
            assert time.monotonic() < end_s, "the service does not answer"
        assert stats_client.stats is not None
        return stats_client.stats


@pytest.mark.parametrize(
    ("planner", "settings"),
    [("adaedl", {"threshold_step": "x"}), ("ssd", {"decay": math.nan}), ("pearl", {"gamma": 2**40})],
)
def test_settings_that_no_planner_can_take_are_refused_and_other_clients_see_nothing(
    planner: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("prometheus_client")
    port = free_port()
    with scripted_service(tmp_path, "--metrics-port", str(port)) as service:
        good = client_for(service.address, namespace=b"good")
        bad = DraftClient(ClientOptions(service.address, planner, settings, deadline_s=0.05, namespace=b"bad"))
        with contextlib.closing(good), contextlib.closing(bad):
            walk, attack = Walk(good, [1, 2]), Walk(bad, [3, 4])
            walk_until_accepted(walk)
            opened, before = good.counts.opened, report(service.address, b"good")
            attack.step_until(lambda: len(attack.calls_s) >= 30 and bad.counts.refused > 0)
            walk_until_accepted(walk, 10)
            after = report(service.address, b"good")

            assert service.process is not None and service.process.poll() is None
            assert good.counts.opened == opened, "no text was forgotten"
            assert after.sessions == before.sessions
            assert after.hits > before.hits and after.accepted > before.accepted
            assert report(service.address, b"bad").sessions == 0
            assert scrape(port, "specbranch_draft_faults_total") == 0
            walk.assert_text_is_the_targets()
            attack.assert_text_is_the_targets()


def test_a_service_whose_compute_thread_has_died_ends_with_an_error(tmp_path: Path) -> None:
    """It would answer for ever and draft nothing; who keeps it starts another one."""
    with (
        scripted_service(tmp_path, "--fatal-step", "20") as service,
        contextlib.closing(client_for(service.address)) as client,
    ):
        assert service.process is not None
        walk, end_s = Walk(client, [1, 2]), time.monotonic() + PATIENCE_S
        while service.process.poll() is None:
            assert time.monotonic() < end_s, "the service lives on without drafts"
            walk.step()
            time.sleep(0.01)

        assert service.process.returncode == 1
        walk.assert_text_is_the_targets()
