"""The trace of a service: what is recorded, with a clock that is turned by hand, and how it looks as a file."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from specbranch.core.distribution import Distribution
from specbranch.engines.base import Row
from specbranch.service.client.client import DraftClient
from specbranch.service.client.interface import ClientOptions
from specbranch.service.server.timeline_recorder import SUBMITTED, RowVerdict, TimelineRecorder
from specbranch.service.wire.messages import DraftReply
from specbranch.simulation.scripted import ScriptedEngine
from tests.service.harness import DRAFT, PATIENCE_S, Walk, scripted_service
from tests.service.server.test_lookup import Bench, likely

LANE = (b"me", b"ours")
ROW = RowVerdict(submitted=3, committed=2, is_known=True, is_hit=True)


class TimedEngine(ScriptedEngine):
    """Every step takes 10 ms of the bench's time."""

    bench: Bench

    def run(self, rows: Sequence[Row]) -> list[Distribution]:
        self.bench.now_s += 0.010
        return super().run(rows)


def timed_bench() -> tuple[Bench, TimelineRecorder]:
    timeline, engine = TimelineRecorder(), TimedEngine(DRAFT)
    bench = Bench(engine, timeline=timeline)
    engine.bench = bench
    return bench, timeline


def spans(timeline: TimelineRecorder, category: str) -> list[dict[str, Any]]:
    return [event for event in timeline.trace_events() if event.get("cat") == category]


def test_what_lies_between_an_answer_and_the_next_verdict_is_the_targets_step() -> None:
    bench, timeline = timed_bench()
    bench.open([1, 2])
    bench.step([1, 2], 3)
    bench.now_s += 0.25
    bench.step([1, 2, 3], 4, 5, sent=2)

    (step,) = spans(timeline, "step")
    assert step["dur"] == pytest.approx(250_000)
    figures = {"rows": 1, "new_rows": 0, "submitted": 2, "accepted": 1, "committed": 2, "is_prefill": False}
    assert step["args"] == figures
    assert step["name"] == "1/2"


def test_a_verdict_that_was_prepared_is_a_hit_and_another_one_a_miss() -> None:
    bench, timeline = timed_bench()
    bench.open([1, 2, 3])
    bench.work()
    token = likely([1, 2, 3])
    bench.step([1, 2, 3], token)
    unlikely = DRAFT.distribution((1, 2, 3, token)).ids[-1]
    bench.step([1, 2, 3, token], unlikely)

    kinds = [event["cat"] for event in timeline.trace_events() if event["ph"] == "i"]
    assert kinds == ["open", "hit", "verdict", "miss", "verdict"]
    assert spans(timeline, "hit")[0]["args"] == {"rows": 1}


def test_with_a_verdict_goes_the_tree_that_it_met() -> None:
    bench, timeline = timed_bench()
    bench.open([1, 2, 3])
    bench.work()
    token = likely([1, 2, 3])
    (reply,) = bench.step([1, 2, 3], token)
    assert isinstance(reply, DraftReply) and reply.rows[0]
    sent = reply.rows[0]
    bench.work()
    bench.step([1, 2, 3, token], sent[0], 5, sent=1)
    first, second = (event["args"] for event in spans(timeline, "verdict"))
    tree = second["tree"]
    marked = [node for node, marks in zip(tree["tokens"], tree["marks"], strict=True) if marks & SUBMITTED]

    assert (first["tokens"], first["submitted"], first["is_hit"]) == ((token,), 0, True)
    assert (second["tokens"], second["submitted"], second["session"]) == ((sent[0], 5), 1, first["session"])
    assert marked == sent[:1], "what was proposed and not sent is not under verification"
    assert tree["parents"][tree["tokens"].index(sent[0])] == 0
    assert all(parent <= index for index, parent in enumerate(tree["parents"])), "parents come first"
    assert {len(column) for column in tree.values()} == {len(tree["tokens"])}


def test_trees_are_recorded_until_there_is_no_room_for_them() -> None:
    timeline, engine = TimelineRecorder(max_nodes=1), TimedEngine(DRAFT)
    bench = engine.bench = Bench(engine, timeline=timeline)
    bench.open([1, 2, 3])
    bench.work()
    bench.step([1, 2, 3], 4)
    bench.step([1, 2, 3, 4], 5)

    assert len(spans(timeline, "verdict")) == 1
    assert len(spans(timeline, "step")) == 1, "the rest is recorded as before"


def test_an_answer_that_was_held_back_is_a_wait() -> None:
    bench, timeline = timed_bench()
    bench.open([1, 2, 3], planner="sps")
    bench.step([1, 2, 3], 4, wait_ms=50)
    bench.work()
    bench.handler.answer_ready()

    (wait,) = spans(timeline, "wait")
    assert wait["dur"] == pytest.approx(10_000 * bench.runner.counts.steps)
    assert len(spans(timeline, "draft")) == bench.runner.counts.steps


def test_a_client_that_went_on_without_its_answer_waited_until_its_deadline() -> None:
    bench, timeline = timed_bench()
    bench.open([1, 2, 3], planner="sps")
    bench.step([1, 2, 3], 4, wait_ms=50)
    bench.now_s += 0.2
    bench.step([1, 2, 3, 4], 5, round=2)

    assert spans(timeline, "wait")[0]["dur"] == pytest.approx(50_000)
    assert spans(timeline, "step")[0]["dur"] == pytest.approx(150_000)


def test_a_step_with_new_texts_only_may_have_been_a_pause() -> None:
    """The service does not hear when a target begins with a prompt."""
    bench, timeline = timed_bench()
    bench.step([7, 8], 9)
    bench.now_s += 3
    bench.step([1, 2], 3)

    (step,) = spans(timeline, "step")
    assert (step["name"], step["args"]["is_prefill"], step["args"]["new_rows"]) == ("prefill or idle", True, 1)
    assert not spans(timeline, "miss")


def test_draft_steps_tell_rows_tokens_sessions_and_whether_a_text_is_read_in() -> None:
    bench, timeline = timed_bench()
    bench.open([1, 2, 3, 4, 5, 6])
    bench.work(3)
    bench.open([7])
    bench.work(1)

    first, second, third, last = (event["args"] for event in spans(timeline, "draft"))
    assert (first["rows"], first["tokens"], first["is_prefill"]) == (1, 4, True)
    assert (second["rows"], second["tokens"], second["is_prefill"]) == (1, 2, True)
    assert (third["rows"], third["tokens"], third["is_prefill"]) == (1, 1, False)
    assert (last["rows"], last["tokens"]) == (2, 2)
    assert len(last["sessions"]) == 2


def test_no_two_spans_of_a_lane_overlap_and_a_target_never_works_while_it_waits() -> None:
    bench, timeline = timed_bench()
    text = [1, 2, 3]
    bench.open(text, planner="sps")
    for index in range(1, 12):
        bench.now_s += 0.05
        bench.step(text, token := likely(text), round=index, wait_ms=25, sent=0)
        text.append(token)
        bench.work(2)
        bench.handler.answer_ready()
        bench.handler.answer_overdue()

    waits, steps, drafts = (spans(timeline, kind) for kind in ("wait", "step", "draft"))
    assert len(waits) > 5 and len(steps) > 5 and len(drafts) > 10
    for lane in (waits + steps, drafts):
        lane.sort(key=lambda event: float(event["ts"]))
        assert all(one["ts"] + one["dur"] <= other["ts"] + 0.01 for one, other in pairwise(lane))


def test_every_client_and_namespace_has_its_own_named_lanes() -> None:
    timeline = TimelineRecorder()
    for lane in ((b"a", b"x"), (b"b", b"x"), (b"a", b"y")):
        timeline.answer(lane, 1.0, 1.5, num_held=1)
        timeline.arrive(lane, 2.0, [ROW])
    names = {event["tid"]: event["args"]["name"] for event in timeline.trace_events() if event["name"] == "thread_name"}

    assert [names[event["tid"]] for event in spans(timeline, "step")] == ["target 1", "target 2", "target 3"]
    assert [names[event["tid"]] for event in spans(timeline, "wait")] == ["wait 1", "wait 2", "wait 3"]


def test_the_file_is_a_chrome_trace(tmp_path: Path) -> None:
    timeline = TimelineRecorder()
    timeline.open(LANE, 5.0, "pearl", 1, 12)
    timeline.answer(LANE, 5.0, 5.1, num_held=0)
    timeline.arrive(LANE, 5.2, [ROW, ROW])
    timeline.draft(5.0, 5.15, rows=2, tokens=2, is_prefill=False, sessions={4, 3})
    timeline.write(tmp_path / "trace.json", draft="tiny")
    document = json.loads((tmp_path / "trace.json").read_text())

    assert document["otherData"] == {"draft": "tiny", "is_cut": False}
    events = document["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "i"}
    for event in events:
        assert {"name", "ph", "pid", "tid", "args"} <= set(event)
        assert event["ph"] == "M" or event["ts"] >= 0
        assert (event["ph"] == "X") == ("dur" in event)
        assert (event["ph"] == "i") == (event.get("s") == "t")
    (draft,) = (event for event in events if event.get("cat") == "draft")
    assert (draft["ts"], draft["dur"], draft["args"]["sessions"]) == (0.0, pytest.approx(150_000), [3, 4])
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_an_empty_trace_is_a_valid_file(tmp_path: Path) -> None:
    TimelineRecorder().write(tmp_path / "trace.json")

    document = json.loads((tmp_path / "trace.json").read_text())
    assert all(event["ph"] == "M" for event in document["traceEvents"])


def test_a_full_trace_says_so_once_and_takes_no_more(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    timeline = TimelineRecorder(max_events=3)
    with caplog.at_level(logging.WARNING):
        for index in range(10):
            timeline.draft(index, index + 0.5, 1, 1, False, {1})
        timeline.arrive((b"late", b"n"), 20.0, [ROW])
    timeline.write(tmp_path / "trace.json")

    assert len(timeline) == 3
    assert len(caplog.records) == 1 and "the timeline is full after" in caplog.records[0].message
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["is_cut"]


def test_a_service_writes_its_trace_when_it_is_told_to_end(tmp_path: Path) -> None:
    """A real process with sockets and both threads, ended by SIGTERM."""
    path = tmp_path / "trace.json"
    with scripted_service(tmp_path, "--timeline", str(path)) as service:
        with closing(
            DraftClient(ClientOptions(service.address, "pearl", {"gamma": 3}, deadline_s=PATIENCE_S))
        ) as client:
            assert client.hello(PATIENCE_S) is not None
            walk = Walk(client, [1, 2, 3])
            for _ in range(40):
                walk.step()
            assert client.hello(PATIENCE_S) is not None  # answered in order, so the last step has come
        assert service.stop() == 0
    events = json.loads(path.read_text())["traceEvents"]
    rounds = [event for event in events if event.get("cat") in ("hit", "miss")]

    assert 30 <= len(rounds) <= 40
    drafts = sorted((event["ts"], event["dur"]) for event in events if event.get("cat") == "draft")
    assert all(one[0] + one[1] <= other[0] + 0.01 for one, other in pairwise(drafts))


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_timeline_can_be_read_by_its_owner_only(tmp_path: Path, umask: int) -> None:
    """Also where a run that was killed has left a part of one."""
    path = tmp_path / "trace.json"
    (tmp_path / "trace.json.part").touch()
    (tmp_path / "trace.json.part").chmod(0o666)
    before = os.umask(umask)
    try:
        TimelineRecorder().write(path)
    finally:
        os.umask(before)

    assert path.stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "trace.json.part").exists()
    assert json.loads(path.read_text())["otherData"] == {"is_cut": False}
