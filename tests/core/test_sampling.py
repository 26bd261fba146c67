"""How requests sample: what is drawn from, and by which numbers."""

from __future__ import annotations

import numpy as np
import pytest

from specbranch.core.distribution import TEXT_LEN, Distribution, RequestSampling, inverse_cdf, seeded_uniform

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
