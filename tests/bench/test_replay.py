"""The page that plays a run: what is in it, and that a browser shows it where one is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from array import array
from pathlib import Path
from typing import Any

import pytest

from specbranch.bench.timeline import Timeline, read_timeline, replay_document, write_replay
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
TEXTS = {1: " one", 2: " two", 3: "</script>", 4: " four"}


def spell(token: int) -> str:
    return TEXTS[token]


@pytest.fixture
def timeline(tmp_path: Path) -> Timeline:
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


def written(timeline: Timeline, path: Path) -> str:
    write_replay(path, timeline, "a run", spell)
    return path.read_text()


def data_of(page: str) -> dict[str, Any]:
    (found,) = re.findall(r"^const run = (.*);$", page, re.MULTILINE)
    document: dict[str, Any] = json.loads(found)
    return document


def test_the_page_has_lanes_verdicts_and_the_texts_of_all_tokens(timeline: Timeline, tmp_path: Path) -> None:
    document = data_of(written(timeline, tmp_path / "run.html"))
    (target,) = document["targets"]

    assert timeline.draft == "no-such-model"
    assert target["steps"] == [[0.0, 0.1, 1, 2], [0.1, 0.2, 0, 0]]
    assert [one["tokens"] for one in target["verdicts"]] == [[1, 4], [3]]
    assert target["verdicts"][0]["tree"]["parents"] == [0, 1, 1]
    assert document["drafts"] == [[0.0, 0.05, 2]]
    assert document["texts"] == {str(token): text for token, text in TEXTS.items()}


def test_no_token_can_end_the_script(timeline: Timeline, tmp_path: Path) -> None:
    page = written(timeline, tmp_path / "run.html")

    assert page.count("</script>") == 1
    assert "http" not in page.replace("http://www.w3.org/2000/svg", ""), "it needs nothing else"


def test_the_page_in_the_docs_is_that_of_the_kept_run() -> None:
    document = data_of((ROOT / "docs" / "replay.html").read_text())
    kept = replay_document(read_timeline(ROOT / "benchmarks" / "replay.json"), document["title"], str)

    assert {**document, "texts": None} == {**json.loads(json.dumps(kept)), "texts": None}
    assert document["texts"].keys() == {str(token) for token in kept["texts"]}


def test_a_browser_shows_what_became_of_each_token(timeline: Timeline, tmp_path: Path) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("chromium is not installed")
    written(timeline, tmp_path / "run.html")
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"file://{tmp_path}/run.html#round=1"]
    done = subprocess.run([browser, *words], capture_output=True, text=True, check=True, timeout=60)

    assert (
        "Round 1 of 2: 1 of 2 accepted, then the target's own token “·four”. The branch behind it was ready (hit)."
        in (done.stdout)
    )
    assert done.stdout.count("<rect") > 4
