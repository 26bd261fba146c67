"""The tests that `specbranch check` relies on: known values, exact false-alarm rates, and power."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from specbranch.exactness.statistics import (
    Outcomes,
    chi_square,
    combine_p_values,
    compare_all,
    compare_counts,
    compare_means,
    count_pairs,
    detectable_shift,
    draws_for,
    holm,
    shifted,
    tables,
)


def counts(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, dtype=np.int64)


def test_chi_square_of_a_known_table() -> None:
    """By hand: 10 of 20 and 20 of 20, expected 15, 15, 5, 5: 25/15 + 25/15 + 25/5 + 25/5 = 40/3."""
    assert math.isclose(chi_square(counts(10, 10), counts(20, 0)), 40 / 3)
    assert chi_square(counts(5, 7), counts(10, 14)) == pytest.approx(0)


def test_p_value_of_the_lady_tasting_tea() -> None:
    """Eight cups, all told apart: 2 of the 70 ways are that extreme; six of eight: 34 of 70."""
    rng = np.random.default_rng(0)

    assert compare_counts(counts(4, 0), counts(0, 4), 0.05, rng).p_value == pytest.approx(2 / 70)
    assert compare_counts(counts(3, 1), counts(1, 3), 0.05, rng).p_value == pytest.approx(34 / 70)


def test_tables_are_all_the_ways_to_share_out_the_pooled_values() -> None:
    found = dict(tables([3, 2, 2], 4))
    by_hand: dict[tuple[int, ...], int] = {}
    for places in itertools.combinations(range(7), 4):
        table = tuple(sum("aaabbcc"[place] == value for place in places) for value in "abc")
        by_hand[table] = by_hand.get(table, 0) + 1

    assert found == by_hand


@pytest.mark.parametrize("level", [Fraction(1, 100), Fraction(1, 20), Fraction(1, 4)])
def test_the_false_alarm_rate_is_at_most_the_level_whatever_the_distribution(level: Fraction) -> None:
    """Enumeration, no sampling: all pairs of samples of four from three values, in rational arithmetic."""
    rng = np.random.default_rng(0)
    distribution = (Fraction(1, 2), Fraction(3, 10), Fraction(1, 5))
    samples: dict[tuple[int, ...], Fraction] = {}
    for drawn in itertools.product(range(3), repeat=4):
        table = tuple(drawn.count(value) for value in range(3))
        samples[table] = samples.get(table, Fraction(0)) + math.prod(
            (distribution[value] for value in drawn), start=Fraction(1)
        )
    alarms = sum(
        chance * other_chance
        for (one, chance), (other, other_chance) in itertools.product(samples.items(), repeat=2)
        if compare_counts(counts(*one), counts(*other), float(level), rng).p_value <= level
    )

    assert sum(samples.values()) == 1
    assert alarms <= level
    assert level < Fraction(1, 20) or alarms > 0  # it can raise an alarm at all


def test_merging_rare_values_keeps_the_sizes() -> None:
    ones, others = count_pairs("aaaaab", "aacc", rare=5)

    assert (ones.tolist(), others.tolist()) == ([5, 1], [2, 2])


def test_nothing_is_merged_where_nothing_is_rare() -> None:
    ones, others = count_pairs("aaab", "abbb", rare=4)

    assert (ones.tolist(), others.tolist()) == ([3, 1], [1, 3])


def test_a_drawn_p_value_is_close_to_the_enumerated_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """100,000 draws: five standard deviations are 0.008 at most, a false alarm once in a million."""
    ones, others = counts(9, 4, 2), counts(4, 6, 5)
    exact = compare_counts(ones, others, 1e-4, np.random.default_rng(0))
    monkeypatch.setattr("specbranch.exactness.statistics._MAX_TABLES", 0)
    drawn = compare_counts(ones, others, 1e-4, np.random.default_rng(0))

    assert abs(drawn.p_value - exact.p_value) < 0.008
    assert drawn.p_value != exact.p_value


def test_a_drawn_p_value_is_never_zero_and_can_reach_the_level() -> None:
    test = compare_counts(counts(400, 0), counts(0, 400), 1e-3, np.random.default_rng(0))

    assert test.p_value == pytest.approx(1 / (1 + draws_for(1e-3)))
    assert test.statistic > test.critical


def test_equal_samples_are_never_significant() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=50)

    assert compare_counts(counts(300, 100), counts(300, 100), 1e-3, rng).p_value == 1
    assert compare_means(values, values, 1e-2, rng).p_value == 1


def test_means_of_a_known_case() -> None:
    """Three against three, all told apart: 2 of 20 ways; 10,000 draws, so 0.015 is five standard deviations."""
    rng = np.random.default_rng(0)
    test = compare_means(np.array([0.0, 1.0, 2.0]), np.array([10.0, 11.0, 12.0]), 1e-3, rng)

    assert abs(test.p_value - 2 / 20) < 0.015


def test_holm_of_a_known_case() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize("distance", [0.0, 0.1, 0.4])
def test_a_shifted_distribution_is_that_far_away(distance: float) -> None:
    distribution = np.array([0.3, 0.3, 0.2, 0.1, 0.1])
    other = shifted(distribution, distance)

    assert math.isclose(other.sum(), 1)
    assert math.isclose(np.abs(other - distribution).sum() / 2, distance, abs_tol=1e-12)


def test_the_shift_that_is_noticed_shrinks_with_more_samples_and_is_noticed() -> None:
    """The stated power is checked with the test itself: 200 shifted samples; under 160 alarms once in 10^5."""
    rng = np.random.default_rng(0)
    distribution, level = np.array([0.4, 0.3, 0.2, 0.1]), 1e-2
    shifts = []
    for size in (100, 400):
        even = (distribution * size).astype(np.int64)
        critical = compare_counts(even, even, level, rng).critical
        shifts.append(detectable_shift(even, even, critical, rng))
    other = shifted(distribution, shifts[1])
    alarms = sum(
        compare_counts(rng.multinomial(400, distribution), rng.multinomial(400, other), level, rng).p_value <= level
        for _ in range(200)
    )

    assert 0 < shifts[1] < shifts[0] < 1
    assert alarms >= 160


def test_a_distribution_of_one_value_cannot_show_a_shift() -> None:
    rng = np.random.default_rng(0)
    test = compare_counts(counts(50), counts(50), 1e-3, rng)

    assert test.p_value == 1
    assert detectable_shift(counts(50), counts(50), test.critical, rng) == 1


def test_a_distribution_moved_as_far_as_it_goes_is_still_a_distribution() -> None:
    """With few samples the search tries the whole distance, where the last digit fell outside of 0 to 1."""
    rng = np.random.default_rng(0)
    for few in range(1, 12):
        distribution = np.array([few, 12 - few]) / 12
        moved = shifted(distribution, 1.0)

        assert ((moved >= 0) & (moved <= 1)).all()
        rng.multinomial(6, moved)


def test_p_values_combined_by_hand() -> None:
    """Two uniform numbers: P(product <= t) = t - t ln t, the area under the curve."""
    assert combine_p_values([0.5, 0.2]) == pytest.approx(0.1 - 0.1 * math.log(0.1))
    assert combine_p_values([0.03]) == pytest.approx(0.03)
    assert combine_p_values([1.0, 1.0, 1.0]) == 1.0


def test_combined_p_values_of_one_distribution_are_uniform() -> None:
    """10,000 combinations of five uniform p-values: 0.01 and 0.2 are met within five standard deviations."""
    rng = np.random.default_rng(0)
    found = np.array([combine_p_values(row) for row in rng.uniform(size=(10_000, 5)).tolist()])

    for level in (0.01, 0.2):
        assert abs((found <= level).mean() - level) < 5 * math.sqrt(level * (1 - level) / 10_000)


def test_the_test_of_all_together_counts_among_the_tests() -> None:
    """One more test, one more in the correction; it is the last."""
    pairs = [Outcomes("a" * 30 + "b" * 10, "a" * 20 + "b" * 20)] * 2
    alone, with_all = (compare_all(pairs, 0.05, np.random.default_rng(0), together=is_in) for is_in in (False, True))

    assert (len(alone), len(with_all)) == (2, 3)
    assert [one.p_value for one in alone] == pytest.approx([2 * alone[0].test.p_value] * 2)
    assert with_all[2].test.p_value == pytest.approx(combine_p_values([one.test.p_value for one in alone]))
    assert with_all[2].p_value == pytest.approx(3 * with_all[2].test.p_value)
