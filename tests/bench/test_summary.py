"""What results say: ratios to bare on the same prompts, and their spread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specbranch.bench.summary import ResultError, read_results, summarize


def record(method: str, prompt: int, tokens: int, elapsed_s: float, digest: str = "a", **more: Any) -> dict[str, Any]:
    return {
        "task": "gsm8k",
        "concurrency": 1,
        "repeat": 0,
        "prompt": prompt,
        "method": method,
        "tokens": tokens,
        "elapsed_s": elapsed_s,
        "first_s": 1.0,
        "rounds": 10,
        "digests": [digest],
        "counts": {},
        "draft": {},
        **more,
    }


DRAFT = {"rounds": 20, "hits": 15, "rows": 60, "rejected": 5, "unused": 9, "cut": 1}


def test_speed_is_tokens_over_time_against_bare() -> None:
    records = [
        record("ours", 0, 100, 11.0, counts={"calls": 10, "wait_s": 0.02}),
        record("bare", 0, 100, 21.0),
        record("ours", 1, 50, 6.0, digest="b", counts={"calls": 10, "wait_s": 0.02}, draft=DRAFT),
        record("bare", 1, 50, 11.0),
    ]
    bare, ours = summarize(records)

    assert (bare.method, bare.speedup, bare.low, bare.high) == ("bare", 1.0, 1.0, 1.0)
    assert ours.speedup == pytest.approx((150 / 17) / (150 / 32))
    assert ours.low <= ours.speedup <= ours.high
    assert (ours.low, ours.high) == pytest.approx((11 / 6, 21 / 11))
    assert (ours.emitted_per_round, ours.round_ms) == (7.5, 750.0)
    assert ours.hook_ms == pytest.approx(2.0)
    assert (bare.hook_ms, bare.hit_rate) == (None, None)
    assert (ours.hit_rate, ours.rolled_back, ours.rows_per_round) == (0.75, 0.1, 3.0)
    assert ours.same_as_bare == 0.5


def test_a_run_that_was_cut_off_is_read_as_far_as_it_went() -> None:
    records = [record("ours", 0, 100, 10.0), record("bare", 0, 100, 20.0), record("ours", 1, 100, 10.0)]

    assert [line.trials for line in summarize(records)] == [1, 2]


def test_a_file_without_results_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    for text in ("", "no json", json.dumps({"format": "other"})):
        path.write_text(text)
        with pytest.raises(ResultError):
            read_results(path)
    path.write_text(
        json.dumps({"format": "specbranch-bench", "version": 1}) + "\n" + json.dumps(record("bare", 0, 1, 1.0))
    )
    assert len(read_results(path)[1]) == 1
