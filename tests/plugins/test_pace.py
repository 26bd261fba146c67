"""Which steps can be compared with each other."""

from __future__ import annotations

from collections.abc import Iterator

from specbranch.service.client.gate import StepTimer


def clock() -> Iterator[float]:
    yield from (float(second) for second in range(100))


def test_only_steps_that_go_on_with_the_same_rows_count() -> None:
    pace = StepTimer(clock().__next__)

    assert pace.step_s([1, 1], [10, 20]) is None  # both are new
    assert pace.step_s([1, 3], [11, 23]) == 1.0
    assert pace.step_s([2, 1], [25, 12]) == 1.0  # rows may change places
    assert pace.step_s([1], [13]) is None  # one has left
    assert pace.step_s([1], [14]) == 1.0
    assert pace.step_s([1, 0], [15]) is None  # one is being prefilled
    assert pace.step_s([1, 1], [16, 40]) is None  # and has got its first token
    assert pace.step_s([1, 1], [17, 41]) == 1.0
    assert pace.step_s([1, 1], [18, 9]) is None  # one left and another came
