"""Calibration: the draft's word at first, then what was seen."""

from __future__ import annotations

import random

import pytest

from specbranch.core.calibration import Calibration
from specbranch.core.distribution import Distribution

DISTRIBUTION = Distribution((7, 8, 9), (0.6, 0.3, 0.1), 0.9)


def test_without_experience_the_draft_is_believed() -> None:
    calibration = Calibration()

    assert [calibration.accept_prob(DISTRIBUTION, token) for token in DISTRIBUTION.ids] == pytest.approx(
        [0.6, 0.3, 0.1]
    )


def test_chances_become_the_frequencies_that_were_seen() -> None:
    """A target that is surer than its draft: 90 % first choices, and of the others nine in ten the second."""
    calibration, order = Calibration(half_life=1000), random.Random(0)
    for _ in range(3000):
        calibration.observe(DISTRIBUTION, order.choices(DISTRIBUTION.ids, (0.9, 0.09, 0.01))[0])

    found = [calibration.accept_prob(DISTRIBUTION, token) for token in DISTRIBUTION.ids]
    assert found == pytest.approx([0.9, 0.09, 0.01], abs=0.03)


def test_a_draft_of_few_bits_is_found_out_at_every_confidence() -> None:
    """It is half as often wrong as it says where it doubts, and wrong often where it is sure."""
    calibration, order = Calibration(half_life=1000), random.Random(0)
    doubtful, sure = Distribution((7, 8), (0.3, 0.2), 2.0), Distribution((7, 8), (0.99, 0.01), 0.1)
    for _ in range(2000):
        calibration.observe(doubtful, 7 if order.random() < 0.65 else 8)
        calibration.observe(sure, 7 if order.random() < 0.85 else 8)

    assert calibration.top1_accept_prob(doubtful) == pytest.approx(0.65, abs=0.05)
    assert calibration.top1_accept_prob(sure) == pytest.approx(0.85, abs=0.05)
    assert 0.65 < calibration.top1_accept_prob(DISTRIBUTION) < 0.85, "what was not seen lies between"


def test_a_draft_that_is_surer_is_never_believed_less() -> None:
    calibration = Calibration()
    for _ in range(500):
        calibration.observe(Distribution((7, 8), (0.1, 0.05), 2.0), 7)
        calibration.observe(Distribution((7, 8), (0.95, 0.01), 0.1), 8)

    chances = [calibration.top1_accept_prob(Distribution((7,), (prob,), 1.0)) for prob in (0.1, 0.5, 0.95)]
    assert chances == sorted(chances)


def test_a_draft_that_is_always_right_does_no_harm() -> None:
    calibration = Calibration(half_life=10)
    for _ in range(5000):
        calibration.observe(DISTRIBUTION, 7)

    assert 0.95 < calibration.top1_accept_prob(DISTRIBUTION) <= 1


def test_the_past_is_forgotten() -> None:
    calibration = Calibration(half_life=100)
    for _ in range(1000):
        calibration.observe(DISTRIBUTION, 7)
    for _ in range(500):
        calibration.observe(DISTRIBUTION, 8)

    assert calibration.top1_accept_prob(DISTRIBUTION) < 0.2
    assert calibration.accept_prob(DISTRIBUTION, 8) > 0.6


def test_a_chance_is_never_more_than_what_is_left() -> None:
    calibration = Calibration()
    for _ in range(50):
        calibration.observe(Distribution((1, 2, 3), (0.5, 0.05, 0.01), 2.0), 2)

    assert calibration.accept_prob(DISTRIBUTION, 8) <= 1 - calibration.top1_accept_prob(DISTRIBUTION)


def test_distributions_without_a_head_and_tokens_outside_of_it_do_no_harm() -> None:
    calibration = Calibration()
    calibration.observe(Distribution((), (), 0.0), 1)
    calibration.observe(Distribution((3,), (1.0,), 0.0), 1)
    calibration.observe(DISTRIBUTION, 1000)

    assert 0 < calibration.top1_accept_prob(DISTRIBUTION) < 0.6
