"""Answers that are there before they are asked for: what the service tells, what the client makes of it."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest

from specbranch.service.client import sequences
from specbranch.service.client.client import DraftClient
from specbranch.service.client.interface import ClientOptions
from specbranch.service.client.sequences import SequenceDelta, SessionTable
from specbranch.service.server import handler
from specbranch.service.wire.messages import (
    MAX_AHEAD,
    DraftReply,
    PrefetchPush,
    PrefetchRow,
    StepRequest,
    StepRow,
    VerdictDraft,
    encode,
)
from specbranch.service.wire.payloads import Digest
from tests.service.harness import PATIENCE_S, Walk, scripted_service
from tests.service.server.test_lookup import Bench, likely

TEXT = [1, 2, 3]


def bench_with(*texts: list[int], planner: str = "budget") -> Bench:
    """A service that has drafted for these texts; it never asks what its target's time is worth."""
    bench = Bench(max_sessions=200)
    if planner == "budget":
        bench.open(*texts, planner=planner, cost_aware=False)
    else:
        bench.open(*texts, planner=planner)
    bench.work()
    return bench


def told(bench: Bench) -> list[PrefetchPush]:
    return [message for _, message in bench.handler.push_prefetched() if isinstance(message, PrefetchPush)]


def test_what_is_told_ahead_is_what_would_be_answered() -> None:
    bench = bench_with(TEXT)
    (message,) = told(bench)
    (row,) = message.rows

    assert row.before == Digest(TEXT).name
    assert [likely(TEXT)] in [outcome.committed for outcome in row.outcomes]
    for outcome in row.outcomes:
        assert bench_with(TEXT).step(TEXT, *outcome.committed) == [DraftReply(1, [outcome.proposal])]


def test_a_row_that_was_told_ahead_is_not_answered_and_its_draft_goes_on() -> None:
    bench = bench_with(TEXT)
    (outcome, *_) = told(bench)[0].rows[0].outcomes
    assert bench.step(TEXT, *outcome.committed, taken=outcome.proposal) == []

    (session,) = bench.store.snapshot()
    assert session.core.submitted == outcome.proposal
    bench.work()
    later = [*TEXT, *outcome.committed]
    assert told(bench)[0].rows[0].before == Digest(later).name
    accepted = [*outcome.proposal, likely([*later, *outcome.proposal])]
    bench.step(later, *accepted, sent=len(outcome.proposal))
    assert session.core.stats.accepted == len(outcome.proposal)


def test_who_waits_is_answered_before_what_was_told_is_followed() -> None:
    texts = [TEXT, [4, 5, 6], [7, 8, 9]]
    bench = bench_with(*texts)
    outcomes = {row.before: row.outcomes[0] for message in told(bench) for row in message.rows}
    rows = []
    for text in texts:
        before = Digest(text)
        outcome = outcomes[before.name]
        is_asked = text == texts[1]
        after = before.extend(outcome.committed)
        taken = None if is_asked else outcome.proposal
        rows.append(StepRow(before.name, outcome.committed, after.name, 0, None, taken))

    answers = bench.handler.handle(b"me", [encode(StepRequest(1, b"ours", 0.0, rows))])
    assert next(answers) == (b"me", DraftReply(1, [[], outcomes[rows[1].before].proposal, []]))
    assert [bench.store.find((b"ours", row.after)) is not None for row in rows] == [False, True, False]
    assert list(answers) == []
    assert all(bench.store.find((b"ours", row.after)) for row in rows)
    assert bench.handler.counts.lookups == 3


def test_of_two_rows_that_go_on_from_one_text_the_first_has_its_session() -> None:
    """Also where the first was told ahead, and only the other one asks."""
    bench = bench_with(TEXT)
    before = Digest(TEXT)
    outcome = told(bench)[0].rows[0].outcomes[0]
    other = [outcome.committed[0] + 1]
    rows = [
        StepRow(before.name, outcome.committed, before.extend(outcome.committed).name, 0, None, outcome.proposal),
        StepRow(before.name, other, before.extend(other).name, 0),
    ]

    assert bench.ask(StepRequest(1, b"ours", 0.0, rows)) == [DraftReply(1, [[], None])]
    assert bench.store.find((b"ours", rows[0].after)) is not None


def test_a_fault_behind_an_answer_costs_one_row_and_sends_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [TEXT, [4, 5, 6], [7, 8, 9]]
    bench = bench_with(*texts)
    rows = []
    for text in texts:
        before, new = Digest(text), [likely(text)]
        rows.append(StepRow(before.name, new, before.extend(new).name, 0, None, None if text == TEXT else [1]))
    session_of = bench.handler.lookup.commit_row
    monkeypatch.setattr(
        bench.handler.lookup,
        "commit_row",
        lambda namespace, row: 1 / 0 if row == rows[1] else session_of(namespace, row),
    )

    (answer,) = bench.ask(StepRequest(1, b"ours", 0.0, rows))
    assert isinstance(answer, DraftReply)
    assert bench.handler.faults.count == 1
    assert bench.store.find((b"ours", rows[2].after)) is not None


def test_a_text_that_is_not_known_is_asked_for_all_the_same() -> None:
    bench = bench_with(TEXT)

    assert bench.step([7, 8], 9, taken=[1, 2]) == []
    assert bench.step([7, 8], 9) == [DraftReply(1, [None])]


def test_nothing_is_told_twice_nor_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_with(TEXT)
    assert len(told(bench)) == 1
    bench.runner._grown.put(bench.store.snapshot()[0])
    assert told(bench) == []

    monkeypatch.setattr(handler, "_MAX_PUSHES", 2)
    bench.step(TEXT, likely(TEXT))
    messages = []
    for _ in range(10):
        bench.work(1)
        messages += told(bench)
    assert len(messages) == 2


def test_a_planner_that_lets_its_target_wait_and_a_forgotten_session_tell_nothing() -> None:
    assert told(bench_with(TEXT, planner="pearl")) == []
    bench = bench_with(TEXT)
    bench.store.drop(bench.store.snapshot()[0])
    assert told(bench) == []


def test_a_message_has_no_more_sequences_than_it_may() -> None:
    texts = [[number, number + 1, 3] for number in range(40)] + [[3, number, 3] for number in range(40)]
    bench = bench_with(*texts)
    bench.work(100)

    first, second = (len(message.rows) for message in told(bench))
    assert first == MAX_AHEAD and 0 < second <= len(texts) - MAX_AHEAD


def test_an_answer_is_taken_once_and_the_oldest_make_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "_MAX_SESSIONS", 2)
    ids = [Digest([number]).name for number in range(3)]
    sessions = SessionTable()

    def pop(before: bytes, new: list[int]) -> VerdictDraft | None:
        (advanced,) = sessions.advance([SequenceDelta(before, new, os.urandom(16))])
        return advanced.pushed

    def store(*numbers: int) -> None:
        for number in numbers:
            row = PrefetchRow(ids[number], [VerdictDraft([4, 5], [6]), VerdictDraft([7], [8])])
            sessions.store([PrefetchPush([row])])

    store(0, 1, 2)
    assert pop(ids[1], [4, 5]) == VerdictDraft([4, 5], [6])
    assert pop(ids[1], [4, 5]) is None
    store(0, 1, 2)
    assert pop(ids[0], [4, 5]) is None
    store(2)
    assert pop(ids[2], [4]) is None  # not foreseen; what was is no longer true
    assert pop(ids[2], [7]) is None
    store(2)
    sessions.clear()
    assert pop(ids[2], [7]) is None


def test_a_target_goes_on_with_what_it_was_told_and_waits_for_nothing(tmp_path: Path) -> None:
    """A real service in another process: the text is the target's, most rounds are answered ahead and accepted."""
    options = {"planner": "budget", "settings": {"cost_aware": False, "gamma": 4}, "deadline_s": PATIENCE_S}
    with (
        scripted_service(tmp_path) as service,
        contextlib.closing(DraftClient(ClientOptions(service.address, **options))) as client,  # type: ignore[arg-type]
    ):
        assert client.hello(PATIENCE_S)
        walk = Walk(client, [1, 2, 3])
        end_s = time.monotonic() + PATIENCE_S
        while client.counts.prefetched <= 10 or walk.num_accepted <= 40:
            assert time.monotonic() < end_s, client.counts
            walk.step()
            time.sleep(0.02)  # the target verifies

        walk.assert_text_is_the_targets()
        assert client.counts.prefetched + client.counts.answered == client.counts.calls


def test_short_submissions_are_told_ahead_too(tmp_path: Path) -> None:
    """A request that wants few draft tokens at once; the service knows, and prepares for just their verdicts."""
    options = {"planner": "budget", "settings": {"cost_aware": False, "gamma": 4}, "deadline_s": PATIENCE_S}
    with (
        scripted_service(tmp_path) as service,
        contextlib.closing(DraftClient(ClientOptions(service.address, **options))) as client,  # type: ignore[arg-type]
    ):
        assert client.hello(PATIENCE_S)
        walk = Walk(client, [1, 2, 3], longest=2)
        lengths = set()
        end_s = time.monotonic() + PATIENCE_S
        while client.counts.prefetched <= 10 or walk.num_accepted <= 30:
            assert time.monotonic() < end_s, client.counts
            walk.step()
            lengths.add(len(walk.proposal))
            time.sleep(0.02)

        walk.assert_text_is_the_targets()
        assert max(lengths) == 2


def test_patience_follows_the_targets_step() -> None:
    options = ClientOptions("ipc:///nowhere", deadline_s=0.1, step_share=0.5)
    with contextlib.closing(DraftClient(options)) as client:
        waits = [client._reply_timeout_s(step_s) for step_s in (0.0, 0.08, 0.0, 1.0, 1.0)]
        client._step_s = 0.001
        waits.append(client._reply_timeout_s(0.0))

    assert waits == pytest.approx([0.1, 0.04, 0.04, 0.086, 0.1, 0.005])
    with contextlib.closing(DraftClient(ClientOptions("ipc:///nowhere", deadline_s=0.1))) as client:
        assert client._reply_timeout_s(0.01) == 0.1
