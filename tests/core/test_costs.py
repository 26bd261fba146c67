"""Step times learned online."""

from __future__ import annotations

import random

import pytest

from specbranch.core.costs import Costs, StepCost, StepEstimate


def test_nothing_is_known_before_the_first_step() -> None:
    assert StepEstimate().cost is None
    assert Costs().draft_steps_per_target_step(1) is None


def test_a_straight_line_is_found_from_exact_samples() -> None:
    estimate = StepEstimate()
    for rows in (1, 4, 8, 2):
        estimate.observe(rows, StepCost(10.0, 2.0).at(rows))

    cost = estimate.cost
    assert cost is not None
    assert (cost.first_s, cost.more_s) == pytest.approx((10.0, 2.0))


def test_samples_of_one_size_say_nothing_of_the_slope() -> None:
    estimate = StepEstimate()
    estimate.observe(3, 5.0)
    estimate.observe(3, 7.0)

    assert estimate.cost == StepCost(pytest.approx(6.0, rel=0.01), 0.0)  # type: ignore[arg-type]


def test_a_step_never_gets_cheaper_by_more_rows() -> None:
    estimate = StepEstimate()
    estimate.observe(1, 9.0)
    estimate.observe(8, 1.0)

    cost = estimate.cost
    assert cost is not None and cost.more_s == 0.0


def test_the_estimate_follows_a_change_and_forgets_the_past() -> None:
    estimate, rng = StepEstimate(half_life=8), random.Random(0)
    for cost in (StepCost(1.0, 0.1), StepCost(3.0, 0.5)):
        for _ in range(200):
            rows = rng.randint(1, 8)
            estimate.observe(rows, cost.at(rows) * rng.uniform(0.99, 1.01))

    found = estimate.cost
    assert found is not None
    assert found.at(1) == pytest.approx(3.0, rel=0.05)
    assert found.at(8) == pytest.approx(6.5, rel=0.05)


def test_the_speed_ratio_follows_the_rows() -> None:
    costs = Costs()
    costs.target.observe(1, 12.0)
    for rows in (1, 5):
        costs.draft.observe(rows, StepCost(2.0, 1.0).at(rows))

    assert costs.draft_steps_per_target_step(1) == pytest.approx(6.0)
    assert costs.draft_steps_per_target_step(3) == pytest.approx(3.0)


def test_a_draft_that_takes_no_time_has_no_speed_ratio() -> None:
    costs = Costs()
    costs.target.observe(1, 12.0)
    costs.draft.observe(1, 0.0)

    assert costs.draft_steps_per_target_step(1) is None


@pytest.mark.parametrize(
    ("cost", "gains", "expected"),
    [
        (StepCost(1.0, 0.5), [0.9, 0.4, 0.1], 1),
        (StepCost(1.0, 0.5), [0.9, 0.5, 0.1], 2),
        (StepCost(1.0, 0.0), [0.9, 0.05, 0.01], 3),
        (StepCost(0.0, 0.0), [0.5], 1),
        (StepCost(1.0, 0.5), [], 0),
    ],
)
def test_rows_pay_as_long_as_they_raise_the_gain_per_time(cost: StepCost, gains: list[float], expected: int) -> None:
    assert cost.best_rows(gains) == expected
