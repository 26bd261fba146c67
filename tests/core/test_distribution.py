"""Random choices, draws and distributions."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbranch.core.distribution import (
    TEXT_LEN,
    Distribution,
    RequestSampling,
    SeededRandom,
    distribution_of,
    inverse_cdf,
    seeded_uniform,
    top_k_of,
)
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


DISTRIBUTION = Distribution((7, 3, 9, 1), (0.5, 0.2, 0.1, 0.05), 1.3)


def test_at_temperature_one_the_named_tokens_share_what_they_have() -> None:
    q = RequestSampling(1.0).apply(DISTRIBUTION)

    assert q.ids == DISTRIBUTION.ids
    assert q.probs == pytest.approx(np.array(DISTRIBUTION.probs) / 0.85)


def test_a_lower_temperature_sharpens() -> None:
    q = RequestSampling(0.5).apply(DISTRIBUTION)

    squares = np.array(DISTRIBUTION.probs) ** 2
    assert q.probs == pytest.approx(squares / squares.sum())


@pytest.mark.parametrize(
    ("top_p", "top_k", "ids"),
    [
        (1.0, 2, (7, 3)),
        (0.5, 0, (7,)),
        (0.7, 0, (7, 3)),
        (0.99, 3, (7, 3, 9)),
        (1e-9, 0, (7,)),
    ],
)
def test_what_the_target_leaves_out_is_left_out(top_p: float, top_k: int, ids: tuple[int, ...]) -> None:
    q = RequestSampling(1.0, top_p, top_k).apply(DISTRIBUTION)

    assert q.ids == ids
    assert sum(q.probs) == pytest.approx(1)


def test_probabilities_are_told_as_they_are_used() -> None:
    """In four bytes: what crosses the wire is what was drawn from, to the last bit."""
    probs = np.array(RequestSampling(0.7, 0.9).apply(DISTRIBUTION).probs)

    assert (probs.astype(np.float32).astype(np.float64) == probs).all()


def test_a_token_whose_probability_is_rounded_to_nothing_is_never_drawn() -> None:
    q = RequestSampling(0.05).apply(Distribution((0, 1), (0.999, 0.001), 0.0))

    assert q.ids == (0,)


def test_numbers_are_even_and_belong_to_a_place() -> None:
    numbers = [seeded_uniform(seed, 40, [1, 2, seed % 7]) for seed in range(4000)]

    counts, _ = np.histogram(numbers, bins=10, range=(0, 1))
    assert counts.min() > 320
    assert len(set(numbers)) == 4000
    base = seeded_uniform(5, 40, [1, 2, 3])
    assert base == seeded_uniform(5, 40, [1, 2, 3])
    assert (
        len(
            {base, seeded_uniform(5, 41, [1, 2, 3]), seeded_uniform(6, 40, [1, 2, 3]), seeded_uniform(5, 40, [1, 2, 4])}
        )
        == 4
    )


def test_only_the_end_of_a_long_text_counts() -> None:
    tail = list(range(TEXT_LEN))

    assert seeded_uniform(1, 9, [5, *tail]) == seeded_uniform(1, 9, [6, *tail]) == seeded_uniform(1, 9, tail)


def test_what_is_picked_follows_the_probabilities() -> None:
    probs = (0.5, 0.3, 0.2)

    picked = [inverse_cdf(probs, (index + 0.5) / 1000) for index in range(1000)]

    assert [picked.count(index) for index in range(3)] == [500, 300, 200]
    assert inverse_cdf(probs, 1.0) == 2


def test_a_flat_distribution_at_a_low_temperature_is_still_one() -> None:
    flat = Distribution(tuple(range(40)), (1e-4,) * 40, 9.0)
    q = RequestSampling(0.01).apply(flat)

    assert len(q.ids) == 32 and sum(q.probs) == pytest.approx(1)


@given(
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([0.0, 1.0, 5.0, 30.0]),
    vocab_len=st.sampled_from([200, 1000, 3001]),
)
def test_the_top_k_equals_a_plain_softmax(seed: int, scale: float, vocab_len: int) -> None:
    logits = (np.random.default_rng(seed).standard_normal(vocab_len) * scale).astype(np.float32)
    exact = np.exp(logits.astype(np.float64) - logits.max())
    exact /= exact.sum()

    distribution = top_k_of(logits, 8)

    assert list(distribution.probs) == pytest.approx(sorted(exact, reverse=True)[:8], rel=1e-4, abs=1e-9)
    assert [exact[i] for i in distribution.ids] == pytest.approx(list(distribution.probs), rel=1e-4, abs=1e-9)
    positive = exact[exact > 0]
    assert distribution.entropy == pytest.approx(-(positive * np.log(positive)).sum(), abs=1e-3)


def test_the_best_tokens_may_all_be_in_one_block() -> None:
    logits = np.zeros(6400, dtype=np.float32)
    logits[130:142] = np.arange(12)

    assert top_k_of(logits, 8).ids == tuple(range(141, 133, -1))


def test_the_best_token_may_be_behind_the_last_whole_block() -> None:
    logits = np.zeros(6401, dtype=np.float32)
    logits[-1] = 5.0

    assert top_k_of(logits, 4).ids == (6400, 0, 1, 2)
