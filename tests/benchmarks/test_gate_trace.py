"""`benchmarks/gate_trace.py`: some minutes of it, and its own arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

from tests.benchmarks.test_step_cost import load
from tests.root import ROOT

SCRIPT = load(ROOT / "benchmarks" / "gate_trace.py")


def pools(good: float, slow: float = 0.5) -> Any:
    """Drafts that give so many tokens in the time of a plain step."""
    return {
        (state, kind, rows): SCRIPT.Kept([(speed, 1.0, True)] * 4)
        for state, speed in (("good", good), ("slow", slow), ("wrong", slow))
        for kind in SCRIPT.ACCEPTANCE
        for rows in SCRIPT.LOADS
    }


def test_a_slow_draft_is_given_up_and_a_good_one_is_used() -> None:
    """Half an hour: 25 minutes of a good draft, then five of a slow one."""
    found = SCRIPT.go(pools(good=2.0), 0, 30, 64)
    by_minute = {policy: [ratio for ratio in found[policy]["by_minute"][25:] if ratio] for policy in ("gate", "always")}

    assert found["gate"]["ratio"] > 1.3
    assert max(by_minute["always"]) < 0.6
    assert min(by_minute["gate"][1:]) > 0.93
    assert found["decided_s"][1] < 60


def test_drafts_that_never_pay_cost_next_to_nothing() -> None:
    found = SCRIPT.go(pools(good=0.5), 1, 20, 64)

    assert found["gate"]["ratio"] > 0.95
    assert found["always"]["ratio"] < 0.6


def test_the_planner_gains_by_a_good_draft_only() -> None:
    found = SCRIPT.keep("sps", "code", 2)

    assert found["good"].speed > 1.2
    assert found["slow"].speed < 1 and found["wrong"].speed < 1


def test_decisions_count_busy_seconds_until_the_calm() -> None:
    seconds = 100
    run = SCRIPT.Run([0], [5 if 10 <= second < 20 else 0 for second in range(seconds)], [10] * seconds)
    run.wrong[:10] = [0] * 10

    assert SCRIPT.settled_s(run, 10, 100) == 0  # five in ten for ten seconds are few enough in thirty
    run.wrong[10:30] = [10] * 20
    assert SCRIPT.settled_s(run, 10, 100) == 13
    run.clear = [0] * seconds
    assert SCRIPT.settled_s(run, 10, 100) is None


def test_a_summary_counts_minutes_below_the_floor() -> None:
    found = SCRIPT.summary(
        [{"ratio": 1.2, "by_minute": [0.9, None, 1.1]}, {"ratio": 1.0, "by_minute": [1.0, 1.0, 1.0]}]
    )

    assert (found["ratio"], found["lowest_ratio"], found["worst_minute"]) == (1.1, 1.0, 0.9)
    assert found["share_below"] == pytest.approx(0.2)


def test_users_are_the_same_for_all_and_never_too_many() -> None:
    assert SCRIPT.users(3, 60) == SCRIPT.users(3, 60) != SCRIPT.users(4, 60)
    assert min(SCRIPT.users(3, 240)) >= 0 and max(SCRIPT.users(3, 240)) <= 64


def test_the_picture_is_drawn_of_a_kept_result() -> None:
    run = SCRIPT.go(pools(good=2.0), 0, 12, 64)
    own = {
        "seeds": [run],
        "summary": {name: SCRIPT.summary([run[name]]) for name in ("gate", "always")},
        "decisions": [],
    }
    document = {"minutes": 12, "schedule": [SCRIPT.SCHEDULE[0]], "planners": {"budget": own, "sps": own}}

    assert SCRIPT.draw(document).count("<path") > 4
    assert "budget, gate" in SCRIPT.words(document)
