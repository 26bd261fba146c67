"""Random choices, draws and distributions."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction

from specbranch.core.distribution import Distribution, SeededRandom, distribution_of
from specbranch.core.node import GreedyPicker, WithoutReplacementPicker


class Fixed(random.Random):
    """A stream that always says the same."""

    def __init__(self, value: float) -> None:
        self._value = value
        super().__init__()

    def random(self) -> float:
        return self._value


def test_choices_follow_their_weights() -> None:
    chance = SeededRandom(random.Random(1))
    counts = Counter(chance.pick((1, 0, 3)) for _ in range(4000))

    assert counts[1] == 0
    # Four standard deviations of a binomial with n = 4000, p = 3/4: a false alarm in 16,000 changes of the seed.
    assert abs(counts[2] - 3000) < 4 * (4000 * 0.75 * 0.25) ** 0.5


def test_rounding_never_chooses_what_has_no_weight() -> None:
    assert SeededRandom(Fixed(1.0)).pick((0.5, 0.5, 0.0)) == 1


def test_the_top_draw_takes_the_most_likely_token_left() -> None:
    distribution = Distribution((7, 3), (0.6, 0.4), 0.67)

    assert GreedyPicker().further(distribution, ()) == 7
    assert GreedyPicker().further(distribution, (7,)) == 3
    assert GreedyPicker().further(distribution, (7, 3)) is None


def test_the_sampled_draw_never_takes_a_token_twice() -> None:
    distribution = Distribution((7, 3), (0.6, 0.4), 0.67)
    draw = WithoutReplacementPicker(SeededRandom(random.Random(0)))

    assert {draw.further(distribution, (7,)) for _ in range(20)} == {3}
    assert draw.further(distribution, (3, 7)) is None


def test_a_distribution_of_weights_is_ordered_and_leaves_impossible_tokens_out() -> None:
    distribution = distribution_of([Fraction(1, 4), Fraction(0), Fraction(1, 2), Fraction(1, 4)])

    assert distribution.ids == (2, 0, 3)
    assert distribution.confidence == Fraction(1, 2)
    assert list(distribution.dense(4)) == [Fraction(1, 4), 0, Fraction(1, 2), Fraction(1, 4)]
