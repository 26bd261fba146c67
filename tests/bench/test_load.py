"""Load on servers, without servers: what is started for each method, in which order, and what is said of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from specbranch.bench.load import LoadTestError, mean_phases, plan_load, serve_words, server
from specbranch.bench.report import load_table, section_of, write_report
from specbranch.bench.results import Record, Results
from specbranch.bench.scenario import BenchMethod, PromptSet, Scenario, Served

METHODS = [
    BenchMethod("bare"),
    BenchMethod("ngram", speculative_config={"method": "ngram", "num_speculative_tokens": 3}, cores=[0, 1]),
    BenchMethod("ours", planner="pearl", settings={"gamma": 3}, is_gated=False),
]
LOAD = Served([0.5, 2.0], requests=8)
SCENARIO = Scenario("load", "t", "d", [PromptSet("gsm8k", "g.jsonl", 2)], METHODS, repeats=2, served=LOAD)


def test_a_method_keeps_its_server_for_all_rates() -> None:
    trials = plan_load(SCENARIO, LOAD)

    assert len(trials) == SCENARIO.num_trials == 12
    for first, second in zip(trials[::2], trials[1::2], strict=True):
        assert first.method == second.method
        assert {first.rate, second.rate} == {0.5, 2.0}
    assert [trial.repeat for trial in trials] == [0] * 6 + [1] * 6


def test_every_method_is_served_with_the_same_flags_of_vllm() -> None:
    bare, ngram, ours = (serve_words(SCENARIO, method) for method in METHODS)
    common = bare[bare.index("--dtype") :]

    assert ngram[-len(common) :] == ours[-len(common) :] == common
    assert bare[: -len(common)] == ["t", "--target-cores", "0", "--enforce-eager", "--bare"]
    assert ngram[1:3] == ["--target-cores", "0,1"]
    assert '"num_speculative_tokens": 3' in ngram[ngram.index("--speculative-config") + 1]
    assert ours[ours.index("--planner") + 1] == "pearl"
    assert ours[ours.index("--set") + 1] == "gamma=3"
    assert '"is_gated": false' in ours[ours.index("--additional-config") + 1]


def test_a_server_that_ends_at_once_is_told_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["specbranch"])
    with pytest.raises(LoadTestError, match=r"was not found|not installed"), server(["model"], tmp_path / "log"):
        pass


def test_what_the_server_counts_is_taken_between_two_readings() -> None:
    """40 requests came meanwhile; the first two were the warm-up."""
    before = {"queue": (0.5, 2.0), "prefill": (1.0, 2.0), "step": (300.0, 20.0)}
    after = {"queue": (2.5, 42.0), "prefill": (9.0, 42.0), "step": (4300.0, 1020.0)}

    assert mean_phases(before, after) == {
        "phases_ms": {"queue": 50.0, "prefill": 200.0},
        "steps": 1000,
        "step_tokens": 4000,
    }


def record(method: str, rate: float, tpot_ms: float, repeat: int = 0) -> Record:
    times = {name: {"p50": tpot_ms, "p99": 2 * tpot_ms, "mean": tpot_ms} for name in ("ttft", "tpot", "itl", "e2el")}
    return {
        "method": method,
        "rate": rate,
        "repeat": repeat,
        "completed": 8,
        "duration_s": 10.0,
        "tokens": 500,
        "tokens_per_s": 50.0,
        "times_ms": times,
    }


def test_the_table_has_a_row_for_every_method_at_every_rate(tmp_path: Path) -> None:
    records = [record("ours", 0.5, 20), record("ours", 0.5, 30, 1), record("bare", 0.5, 40), record("bare", 2.0, 60)]
    results = Results("l.jsonl", SCENARIO, {}, records)

    assert [row[:7] for row in load_table(results).rows] == [
        ["bare", "1", "0.5", "1", "50.0", "40", "80"],
        ["ours", "2", "0.5", "2", "50.0", "25", "50"],
        ["bare", "1", "2", "1", "50.0", "60", "120"],
    ]
    assert "interrupted: 4 of 12 trials" in section_of(results, "ours").facts
    pytest.importorskip("matplotlib")
    page = write_report([results], tmp_path, "ours", "Load").read_text()
    assert "<svg" in page
    assert "Where we lose" not in page
