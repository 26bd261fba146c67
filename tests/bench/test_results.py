"""What results say: ratios to bare on the same prompts, their spread, and where a method loses."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from specbranch.bench.results import (
    NO_RANGE,
    Record,
    ResultError,
    Results,
    drop_unfinished,
    header,
    losses,
    mean_speeds,
    read_results,
    summarize,
)
from specbranch.bench.scenario import BenchMethod, PromptSet, Scenario

METHODS = [
    BenchMethod("bare"),
    BenchMethod("ours", planner="specbranch"),
    BenchMethod("peer", speculative_config={"method": "ngram"}, cores=[0, 1]),
]
SCENARIO = Scenario("small", "t", "d", [PromptSet("gsm8k", "g.jsonl", 2), PromptSet("chat", "c.jsonl", 2)], METHODS)


def record(method: str, prompt: int, tokens: int, elapsed_s: float, digest: str = "a", **more: Any) -> Record:
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


def results_of(*records: Record) -> Results:
    return Results("r.jsonl", SCENARIO, {}, records)


DRAFT = {"rounds": 20, "hits": 15, "rows": 60, "rejected": 5, "unused": 9, "cut": 1}


def test_speed_is_tokens_over_time_against_bare() -> None:
    bare, ours = summarize(
        results_of(
            record("ours", 0, 100, 11.0, counts={"calls": 10, "wait_s": 0.02}, verified=[40, 30], step_ms=20.0),
            record("bare", 0, 100, 21.0),
            record("ours", 1, 50, 6.0, digest="b", counts={"calls": 10, "wait_s": 0.02}, draft=DRAFT),
            record("bare", 1, 50, 11.0),
        )
    )

    assert (bare.method, bare.speed.value, bare.speed.low, bare.speed.high) == ("bare", 1.0, None, None)
    assert ours.speed.value == pytest.approx((150 / 17) / (150 / 32))
    assert ours.speed_per_core == pytest.approx(ours.speed.value / 2)
    assert (ours.emitted_per_round, ours.round_ms, ours.step_ms) == (7.5, 750.0, 20.0)
    assert ours.hook_ms == pytest.approx(2.0)
    assert (bare.hook_ms, bare.hit_rate, bare.accepted_share, bare.lost) == (None, None, None, None)
    assert (ours.hit_rate, ours.rows_per_round) == (0.75, 3.0)
    assert ours.lost == pytest.approx(0.1)
    assert ours.accepted_share == 0.75
    assert (ours.same_as_bare, ours.first_s) == (0.5, 1.0)


def trials(count: int) -> Results:
    """Ours is twice as fast on the first prompt, three times on the next, and so on."""
    pairs = [
        (record("bare", prompt, 100, 10.0 * (prompt + 2)), record("ours", prompt, 100, 10.0)) for prompt in range(count)
    ]
    return results_of(*(one for pair in pairs for one in pair))


@pytest.mark.parametrize("count", [1, 2])
def test_below_three_trials_there_is_no_range_anywhere(count: int) -> None:
    results = trials(count)
    _, ours = summarize(results)
    lost = losses(results, "bare")[0].ahead

    for ratio in (ours.speed, mean_speeds(results)[1]["ours"], lost, lost.scaled(2.0)):
        assert (ratio.low, ratio.high, ratio.num_trials, ratio.range) == (None, None, count, NO_RANGE)
    assert json.loads(json.dumps(ours.as_json()))["speed"] == {
        "value": pytest.approx(ours.speed.value), "low": None, "high": None, "num_trials": count
    }  # fmt: skip


def test_repeats_of_a_prompt_do_not_make_a_range() -> None:
    """They tell how the machine varies, not how prompts do."""
    pairs = [
        (record("bare", prompt, 100, 20.0, repeat=repeat), record("ours", prompt, 100, 10.0 + prompt, repeat=repeat))
        for prompt in range(2)
        for repeat in range(5)
    ]
    _, ours = summarize(results_of(*(one for pair in pairs for one in pair)))

    assert (ours.trials, ours.speed.num_trials, ours.speed.range) == (10, 2, NO_RANGE)


def test_from_three_trials_on_a_range_is_that_of_resampled_prompts() -> None:
    bare, ours = summarize(trials(3))

    assert ours.speed.value == pytest.approx(3.0)
    assert ours.speed.low == pytest.approx(2.0)
    assert ours.speed.high == pytest.approx(4.0)
    assert ours.speed.range == "2.00-4.00"
    assert (bare.speed.low, bare.speed.high) == (None, None), "a method over itself has no spread"


def test_a_run_that_was_cut_off_is_read_as_far_as_it_went() -> None:
    records = [record("ours", 0, 100, 10.0), record("bare", 0, 100, 20.0), record("ours", 1, 100, 10.0)]
    unpaired = [record("ours", 0, 100, 10.0, task="chat"), record("bare", 1, 100, 10.0, task="chat")]

    assert [(line.task, line.method, line.trials) for line in summarize(results_of(*records, *unpaired))] == [
        ("gsm8k", "bare", 1),
        ("gsm8k", "ours", 2),
        ("chat", "bare", 1),
    ]


def test_the_mean_over_tasks_is_geometric() -> None:
    records = [
        record(method, 0, 100, elapsed_s, task=task)
        for task, method, elapsed_s in (
            ("gsm8k", "bare", 8.0), ("gsm8k", "ours", 1.0), ("chat", "bare", 8.0), ("chat", "ours", 4.0)
        )
    ]  # fmt: skip

    assert mean_speeds(results_of(*records))[1]["ours"].value == pytest.approx(4.0)


def test_losses_are_told_in_all_and_for_each_core() -> None:
    def found(ours_s: float) -> list[tuple[str, bool, float]]:
        records = [record("bare", 0, 90, 9.0), record("ours", 0, 90, ours_s), record("peer", 0, 90, 5.0)]
        return [
            (loss.other, loss.is_per_core, round(loss.ahead.value, 3)) for loss in losses(results_of(*records), "ours")
        ]

    assert found(3.0) == []
    assert found(4.6) == [("bare", True, round(2 * 4.6 / 9, 3))]
    assert found(6.0) == [("bare", True, round(12 / 9, 3)), ("peer", False, 1.2)]
    assert found(10.0) == [("bare", False, round(10 / 9, 3)), ("peer", False, 2.0)]


def test_a_file_without_results_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    trace = json.dumps({"format": "specbranch-trace"})
    for content, kind in (
        (b"", "it is empty"),
        (b"no json", "not a file that specbranch wrote"),
        (json.dumps({"format": "other"}).encode(), "not a file that specbranch wrote"),
        (b"[]", "not a file that specbranch wrote"),
        (trace.encode(), "`specbranch simulate --trace` reads it"),
        (gzip.compress(trace.encode()), "`specbranch simulate --trace` reads it"),
        (gzip.compress(b"x")[:5], "a gzip file of another program"),
        (b'{"traceEvents": []}', "`specbranch timeline` reads it"),
    ):
        path.write_bytes(content)
        with pytest.raises(ResultError, match=f"is not a result file of .* it is .*{kind.removeprefix('it is ')}"):
            read_results(path)
    path.write_text(json.dumps({"format": "specbranch-bench"}) + "\n")
    with pytest.raises(ResultError, match="damaged result file"):
        read_results(path)
    with pytest.raises(ResultError, match="cannot read"):
        read_results(tmp_path / "none.jsonl")


def test_a_file_that_was_cut_off_within_a_line_can_be_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    whole = json.dumps(header(SCENARIO, {})) + "\n" + json.dumps(record("bare", 0, 1, 1.0)) + "\n"
    path.write_text(whole + '{"task": "gs')
    assert len(read_results(path).records) == 1
    drop_unfinished(path)

    assert path.read_text() == whole
    drop_unfinished(path)
    results = read_results(path)
    assert (len(results.records), results.scenario) == (1, SCENARIO)
