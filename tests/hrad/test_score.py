"""Figures of predictions, checked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from specbranch.hrad.training import majority, score

TRUTH = np.array([0, 0, 1, 2])


def test_scores_of_a_small_case() -> None:
    chances = np.array([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]])

    one = score(chances, TRUTH)

    assert one.accuracy == 0.75
    assert one.confusion == ((1, 1, 0), (0, 1, 0), (0, 0, 1))
    assert one.macro_f1 == pytest.approx((2 / 3 + 2 / 3 + 1) / 3)
    assert one.log_loss == pytest.approx(-np.log([0.8, 0.1, 0.8, 0.4]).mean())
    # three positions at 0.8, two of them right, and one at 0.4 that is right
    assert one.calibration_error == pytest.approx((3 * (0.8 - 2 / 3) + 0.6) / 4)
    assert one.positions == 4


def test_the_majority_foresees_the_class_that_comes_most_often() -> None:
    one = majority(np.array([0, 0, 0, 1]), TRUTH)

    assert one.accuracy == 0.5
    assert one.macro_f1 == pytest.approx((2 * 2 / 6) / 3)
