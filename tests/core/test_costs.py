"""Step times learned online."""

from __future__ import annotations

import random

import pytest

from specbranch.core.costs import AnswerLength, PairModel, StepCost, StepTimeModel, TargetTimeModel


def test_nothing_is_known_before_the_first_step() -> None:
    assert StepTimeModel().cost is None
    assert PairModel().draft_steps_per_target_step(1) is None


def test_a_straight_line_is_found_from_exact_samples() -> None:
    estimate = StepTimeModel()
    for rows in (1, 4, 8, 2):
        estimate.observe(rows, StepCost(10.0, 2.0).at(rows))

    cost = estimate.cost
    assert cost is not None
    assert (cost.base_s, cost.per_row_s) == pytest.approx((10.0, 2.0))


def test_samples_of_one_size_say_nothing_of_the_slope() -> None:
    estimate = StepTimeModel()
    estimate.observe(3, 5.0)
    estimate.observe(3, 7.0)

    assert estimate.cost == StepCost(pytest.approx(6.0, rel=0.01), 0.0)  # type: ignore[arg-type]


def test_a_step_never_gets_cheaper_by_more_rows() -> None:
    estimate = StepTimeModel()
    estimate.observe(1, 9.0)
    estimate.observe(8, 1.0)

    cost = estimate.cost
    assert cost is not None and cost.per_row_s == 0.0


def test_a_slow_step_with_many_rows_does_not_make_the_first_row_free() -> None:
    estimate = StepTimeModel()
    for rows, step_s in ((1, 2.0), (2, 2.2), (3, 2.4), (4, 7.0)):
        estimate.observe(rows, step_s)

    cost = estimate.cost
    assert cost is not None
    assert cost.base_s == cost.per_row_s == pytest.approx((2.0 + 4.4 + 7.2 + 28.0) / (1 + 4 + 9 + 16), rel=0.02)


def test_a_step_in_which_the_machine_stood_still_counts_as_three_times_its_estimate() -> None:
    estimate, other = StepTimeModel(), StepTimeModel()
    for model, slow_s in ((estimate, 90.0), (other, 3.6)):
        for rows, step_s in ((1, 1.0), (2, 1.1), (3, slow_s), (3, 1.2)):
            model.observe(rows, step_s)

    assert estimate.cost is not None and other.cost is not None
    assert estimate.cost.base_s == pytest.approx(other.cost.base_s, rel=0.01)


def test_drafts_whose_step_met_a_busy_machine_once_are_not_priced_out() -> None:
    """Seen with text drafts on two cores: one step of five seconds had kept them off for some 300 steps."""
    estimate = TargetTimeModel()
    for num_submitted in (0, 0, 3, 0, 5, 0, 2, 0, 0, 4):
        estimate.observe(1, num_submitted, 0.14, 1)
    estimate.observe(1, 4, 5.0, 1)

    assert estimate.min_accept_prob < 0.5


def test_the_estimate_follows_a_change_and_forgets_the_past() -> None:
    estimate, rng = StepTimeModel(half_life=8), random.Random(0)
    for cost in (StepCost(1.0, 0.1), StepCost(3.0, 0.5)):
        for _ in range(200):
            rows = rng.randint(1, 8)
            estimate.observe(rows, cost.at(rows) * rng.uniform(0.99, 1.01))

    found = estimate.cost
    assert found is not None
    assert found.at(1) == pytest.approx(3.0, rel=0.05)
    assert found.at(8) == pytest.approx(6.5, rel=0.05)


def test_the_speed_ratio_follows_the_rows() -> None:
    costs = PairModel()
    costs.target.observe(1, 0, 12.0)
    for rows in (1, 5):
        costs.draft.observe(rows, StepCost(2.0, 1.0).at(rows))

    assert costs.draft_steps_per_target_step(1) == pytest.approx(6.0)
    assert costs.draft_steps_per_target_step(3) == pytest.approx(3.0)


def test_a_draft_that_takes_no_time_has_no_speed_ratio() -> None:
    costs = PairModel()
    costs.target.observe(1, 0, 12.0)
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


def test_the_first_draft_token_of_a_step_may_cost_more_than_the_next_ones() -> None:
    costs = PairModel()
    for num_submitted in (0, 1, 3, 11, 15) * 4:
        costs.target.observe(1, num_submitted, 1.0 if not num_submitted else 2.8 + 0.3 * num_submitted)

    assert costs.target.per_token_s == pytest.approx(0.3, rel=0.01)
    assert costs.target.entry_s == pytest.approx(1.8, rel=0.01)
    assert costs.target.min_accept_prob == pytest.approx(0.3, rel=0.01)
    assert costs.target.min_gain == pytest.approx(1.8, rel=0.01)


def test_the_sequences_of_a_batch_share_what_the_first_draft_token_costs() -> None:
    estimate = TargetTimeModel()
    for num_submitted in (0, 4, 8, 32) * 4:
        estimate.observe(4, num_submitted, 1.0 if not num_submitted else 2.0 + 0.1 * num_submitted)

    assert estimate.entry_s == pytest.approx(0.25, rel=0.01)


def test_drafts_that_did_not_pay_are_tried_again_in_the_end() -> None:
    estimate = TargetTimeModel(half_life=10)
    for num_submitted in (0, *[4, 8] * 8):
        estimate.observe(1, num_submitted, 1.0 if not num_submitted else 90.0 + num_submitted)
    once = estimate.entry_s, estimate.per_token_s
    for _ in range(20):
        estimate.observe(1, 0, 1.0)

    assert (estimate.entry_s, estimate.per_token_s) == pytest.approx([part / 4 for part in once], rel=0.01)


@pytest.mark.parametrize("kinds", [[0], [4], [4, 0]])
def test_a_step_with_drafts_has_no_price_of_its_own_before_it_was_seen_in_several_sizes(kinds: list[int]) -> None:
    estimate = TargetTimeModel()
    for num_submitted in kinds * 4:
        estimate.observe(1, num_submitted, 1.0 + 0.5 * num_submitted)

    assert estimate.entry_s == 0.0
    assert estimate.per_token_s == pytest.approx(0.5 if kinds == [4, 0] else 0.0, rel=0.02)


@pytest.mark.parametrize(("num_drafted", "num_plain"), [(1, 16), (4, 64), (16, 256), (40, 256)])
def test_what_few_steps_with_drafts_have_shown_fades_soon(num_drafted: int, num_plain: int) -> None:
    """One of them may have met a machine that was busy with something else."""
    estimate = TargetTimeModel()
    estimate.observe(1, 0, 1.0)
    for _ in range(num_drafted):
        estimate.observe(1, 4, 9.0)
    assert estimate.per_token_s > 0.5
    belief = []
    for _ in range(num_plain + 1):
        belief.append(estimate._belief)
        estimate.observe(1, 0, 1.0)

    assert belief[0] == 1.0 and belief[-1] == pytest.approx(0.5)


def test_before_the_first_step_with_drafts_much_is_asked_of_them_and_less_the_longer_none_comes() -> None:
    costs = PairModel()
    assert (costs.target.min_accept_prob, costs.target.min_gain) == (0.5, 1.0)
    for _ in range(16):
        costs.target.observe(1, 0, 1.0)
    assert (costs.target.min_accept_prob, costs.target.min_gain) == (0.125, 0.25)
    costs.target.observe(1, 3, 1.0)

    assert (costs.target.min_accept_prob, costs.target.min_gain) == (0.0, 0.0)


def test_time_is_worth_what_the_target_does_without_drafts_where_drafts_make_it_slower() -> None:
    costs = PairModel()
    for num_submitted in (0, 4, 8) * 4:
        costs.observe_step(2, num_submitted, 2, 1.0 + 0.1 * num_submitted)

    assert costs.target.plain_rate == pytest.approx(2.0)
    assert costs.target.min_accept_prob == pytest.approx(0.2, rel=0.01)


def test_what_time_is_worth_follows_the_batch_at_once() -> None:
    """Eight sequences gain three tokens each in a step of 2 s; when one is left, its own gain counts."""
    costs = PairModel()
    for num_submitted in (30, 32, 34) * 8:
        costs.observe_step(8, num_submitted, 24, 0.4 + 0.04 * (8 + num_submitted))
    assert costs.target.min_accept_prob == pytest.approx(0.04 * 24 / 2.0, rel=0.01)
    costs.observe_step(1, 4, 3, 0.6)

    assert costs.target.min_accept_prob == pytest.approx(0.04 * 3 / 0.6, rel=0.02)


def test_the_time_of_a_prefill_token_is_that_of_the_step_without_its_rows() -> None:
    model = StepTimeModel()
    model.observe_prefill(100, 1, 1.0)
    assert model.prefill_token_s == pytest.approx(0.01), "no row was measured"
    model = StepTimeModel()
    model.observe(1, 0.2)
    model.observe_prefill(100, 1, 1.2)
    assert model.prefill_token_s == pytest.approx(0.01)
    model.observe_prefill(100, 1, 2.2)
    assert 0.01 < model.prefill_token_s < 0.02


def test_a_time_measured_on_a_busy_machine_is_measured_again_soon() -> None:
    model = StepTimeModel()
    model.fade(100)  # nothing is known yet
    for _ in range(20):
        model.observe(1, 0.9)
    for _ in range(64):
        model.fade(1)
    assert model.cost is not None
    assert model.cost.base_s == pytest.approx(0.45)
    for _ in range(3):
        model.observe(1, 0.3)

    assert model.cost.base_s < 0.5


def test_a_time_that_was_right_is_back_after_one_step() -> None:
    model = StepTimeModel()
    for rows in (1, 2, 3) * 10:
        model.observe(rows, StepCost(1.0, 0.1).at(rows))
    model.fade(64)
    model.observe(1, 1.0)

    assert model.cost is not None
    assert model.cost.base_s == pytest.approx(1.0)
    assert model.cost.per_row_s == pytest.approx(0.1)


def test_the_mean_length_of_answers_is_that_of_the_ones_that_have_ended() -> None:
    lengths = AnswerLength()
    assert lengths.mean(0) == lengths.mean(1) == 100
    for _ in range(200):
        lengths.begin()
        lengths.add(64)

    assert lengths.mean(0) == pytest.approx(64, rel=0.001)
    for _ in range(16):  # at once, and none of them has ended
        lengths.begin()
    assert lengths.mean(16) == pytest.approx(64, rel=0.001)
    assert lengths.mean(0) < 40
