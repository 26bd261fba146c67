"""Stats and figures of a timeline, from files with known times."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from array import array
from pathlib import Path
from typing import Any

import pytest

from specbranch.bench.figures import choose_stretches
from specbranch.bench.timeline import (
    Timeline,
    TimelineError,
    TimeSpan,
    read_timeline,
    replay_document,
    shared_s,
    time_shares,
    write_replay,
)
from specbranch.service.server.timeline_recorder import (
    RUN,
    SUBMITTED,
    RowVerdict,
    TimelineRecorder,
    TreeSnapshot,
    VerdictTree,
)
from tests.root import ROOT

LANE = (b"me", b"ours")


def known_run() -> TimelineRecorder:
    """Ten rounds of one target from 10 s on: 60 ms of work, 40 ms of waiting in every other; the draft works half."""
    recorder = TimelineRecorder()
    recorder.open(LANE, 10.0, "specbranch", 1, 5)
    recorder.answer(LANE, 10.0, 10.0, num_held=0)
    now_s = 10.0
    for index in range(10):
        recorder.draft(now_s, now_s + 0.04, rows=1 + index % 2, tokens=2, is_prefill=index == 0, sessions={1})
        now_s += 0.06
        recorder.arrive(LANE, now_s, [RowVerdict(4, 3, True, is_hit=index % 5 != 0)])
        held = index % 2
        recorder.answer(LANE, now_s, now_s + 0.04 * held, num_held=held)
        now_s += 0.04 * held
    return recorder


@pytest.fixture
def timeline(tmp_path: Path) -> Timeline:
    known_run().write(tmp_path / "trace.json")
    return read_timeline(tmp_path / "trace.json")


def test_a_file_gives_back_where_the_time_went(timeline: Timeline) -> None:
    (lane,) = timeline.targets
    figures = time_shares(timeline, lane)

    assert lane.label == "target 1: specbranch"
    assert figures.time_s == pytest.approx(0.8)
    assert figures.busy == pytest.approx(0.75)
    assert figures.waiting == pytest.approx(0.25)
    assert figures.draft_busy == pytest.approx(0.5)
    assert figures.hit_rate == pytest.approx(0.8)
    assert (figures.rounds, figures.accepted_per_round, figures.emitted_per_round) == (10, 2.0, 3.0)
    assert figures.rows_per_draft_step == pytest.approx(1.5)


def test_a_pause_between_requests_is_no_ones_time(tmp_path: Path) -> None:
    recorder = known_run()
    recorder.draft(13.0, 14.0, rows=1, tokens=50, is_prefill=True, sessions={2})
    recorder.arrive(LANE, 20.0, [RowVerdict(0, 1, is_known=False, is_hit=None)])
    recorder.answer(LANE, 20.0, 20.0, num_held=0)
    recorder.arrive(LANE, 20.2, [RowVerdict(0, 1, is_known=True, is_hit=True)])
    recorder.write(tmp_path / "trace.json")
    timeline = read_timeline(tmp_path / "trace.json")
    figures = time_shares(timeline, timeline.targets[0])

    assert figures.time_s == pytest.approx(1.0)
    assert figures.busy == pytest.approx(0.8)
    assert figures.draft_busy == pytest.approx(0.4)


def test_a_stretch_holds_only_what_happened_in_it(timeline: Timeline) -> None:
    part = timeline.between(0.03, 0.13)
    (lane,) = part.targets

    assert [step.start_s for step in lane.steps] == [pytest.approx(0.03), pytest.approx(0.06)]
    assert [step.end_s for step in lane.steps] == [pytest.approx(0.06), pytest.approx(0.12)]
    assert [wait.end_s for wait in lane.waits] == [pytest.approx(0.13)]
    assert len(lane.marks) == 2
    with pytest.raises(TimelineError, match="choose another range"):
        timeline.between(50, 60)


def test_a_picture_shows_so_many_rounds_from_the_middle(timeline: Timeline) -> None:
    ((start_s, end_s),) = choose_stretches(timeline, num_rounds=4)
    (lane,) = timeline.between(start_s, end_s).targets

    assert len(lane.steps) in (4, 5, 6)
    assert start_s > 0.1 and end_s < 0.7


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", "empty"),
        ("[]", "not a file that specbranch wrote"),
        ("{}", "not a file that specbranch wrote"),
        ('{"traceEvents": [{}]}', "a damaged timeline"),
        ('{"traceEvents": [{"ph": "X", "cat": 1}]}', "a damaged timeline"),
        ('{"format": "specbranch-bench"}\n', "`specbranch bench show` reads it"),
        ('{"format": "specbranch-trace"}\n{}\n', "`specbranch simulate --trace` reads it"),
    ],
)
def test_another_file_is_refused_with_what_it_is(text: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)

    with pytest.raises(TimelineError, match=f"is not a timeline: it is .*{kind}"):
        read_timeline(path)


def test_the_time_that_two_rows_of_spans_share() -> None:
    some = [TimeSpan(0, 2, {}), TimeSpan(3, 4, {})]
    others = [TimeSpan(1, 3.5, {}), TimeSpan(3.75, 9, {})]

    assert shared_s(some, others) == 1 + 0.5 + 0.25
    assert shared_s(others, some) == shared_s(some, others)


TEXTS = {1: " one", 2: " two", 3: "</script>", 4: " four"}


def spell(token: int) -> str:
    return TEXTS[token]


@pytest.fixture
def recorded_timeline(tmp_path: Path) -> Timeline:
    """Two verdicts: 1 of 2 accepted and a prepared token behind it; then nothing prepared."""
    tree = TreeSnapshot(array("H", [0, 1, 1]), array("i", [1, 2, 4]), array("B", [90, 60, 20]), array("B", [3, 3, RUN]))
    assert tree.marks[0] == RUN | SUBMITTED
    recorder = TimelineRecorder()
    recorder.answer(LANE, 0.0, 0.0, num_held=0)
    recorder.draft(0.0, 0.05, rows=2, tokens=2, is_prefill=False, sessions={7})
    recorder.arrive(LANE, 0.1, [RowVerdict(2, 2, True, True, VerdictTree(7, (1, 4), tree))])
    recorder.answer(LANE, 0.1, 0.1, num_held=0)
    recorder.arrive(LANE, 0.2, [RowVerdict(0, 1, True, False, VerdictTree(7, (3,), tree))])
    recorder.write(tmp_path / "run.json", draft="no-such-model")
    return read_timeline(tmp_path / "run.json")


def written(recorded_timeline: Timeline, path: Path) -> str:
    write_replay(path, recorded_timeline, "a run", spell)
    return path.read_text()


def data_of(page: str) -> dict[str, Any]:
    (found,) = re.findall(r"^const run = (.*);$", page, re.MULTILINE)
    document: dict[str, Any] = json.loads(found)
    return document


def test_the_page_has_lanes_verdicts_and_the_texts_of_all_tokens(recorded_timeline: Timeline, tmp_path: Path) -> None:
    document = data_of(written(recorded_timeline, tmp_path / "run.html"))
    (target,) = document["targets"]

    assert recorded_timeline.draft == "no-such-model"
    assert target["steps"] == [[0.0, 0.1, 1, 2], [0.1, 0.2, 0, 0]]
    assert [one["tokens"] for one in target["verdicts"]] == [[1, 4], [3]]
    assert target["verdicts"][0]["tree"]["parents"] == [0, 1, 1]
    assert document["drafts"] == [[0.0, 0.05, 2]]
    assert document["texts"] == {str(token): text for token, text in TEXTS.items()}


def test_no_token_can_end_the_script(recorded_timeline: Timeline, tmp_path: Path) -> None:
    page = written(recorded_timeline, tmp_path / "run.html")

    assert page.count("</script>") == 1
    assert "http" not in page.replace("http://www.w3.org/2000/svg", ""), "it needs nothing else"


def test_the_page_in_the_docs_is_that_of_the_kept_run() -> None:
    document = data_of((ROOT / "docs" / "replay.html").read_text())
    kept = replay_document(read_timeline(ROOT / "benchmarks" / "replay.json"), document["title"], str)

    assert {**document, "texts": None} == {**json.loads(json.dumps(kept)), "texts": None}
    assert document["texts"].keys() == {str(token) for token in kept["texts"]}


def test_a_browser_shows_what_became_of_each_token(recorded_timeline: Timeline, tmp_path: Path) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("chromium is not installed")
    written(recorded_timeline, tmp_path / "run.html")
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"file://{tmp_path}/run.html#round=1"]
    done = subprocess.run([browser, *words], capture_output=True, text=True, check=True, timeout=60)

    assert (
        "Round 1 of 2: 1 of 2 accepted, then the target's own token “·four”. The branch behind it was ready (hit)."
        in (done.stdout)
    )
    assert done.stdout.count("<rect") > 4
