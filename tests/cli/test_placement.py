"""Which cores the target and the draft get."""

from __future__ import annotations

from functools import partial

import pytest

from specbranch.cli.placement import Cores, split, without_siblings


@pytest.mark.parametrize(
    ("num", "target", "draft"),
    [(1, (0,), (0,)), (2, (0,), (1,)), (3, (0, 1), (2,)), (8, (0, 1, 2, 3), (4, 5, 6, 7))],
)
def test_the_draft_gets_half_of_the_cores_and_at_least_one(
    num: int, target: tuple[int, ...], draft: tuple[int, ...]
) -> None:
    assert split(range(num), target_on_cpu=True, draft_on_cpu=True) == Cores(target, draft)


def test_cores_that_were_asked_for_stand_and_the_other_side_gets_the_rest() -> None:
    both = partial(split, target_on_cpu=True, draft_on_cpu=True)

    assert both(range(4), target=[0]) == Cores((0,), (1, 2, 3))
    assert both(range(4), draft=[1]) == Cores((0, 2, 3), (1,))
    assert both(range(2), target=[0, 1]) == Cores((0, 1), (0, 1))
    assert both(range(2), target=[0, 1], draft=[1]) == Cores((0, 1), (1,))


def test_beside_a_gpu_only_the_side_on_the_cpu_has_cores() -> None:
    assert split(range(8), target_on_cpu=False, draft_on_cpu=True) == Cores(None, tuple(range(6)))
    assert split(range(1), target_on_cpu=False, draft_on_cpu=True) == Cores(None, (0,))
    assert split(range(2), target_on_cpu=True, draft_on_cpu=False) == Cores((0, 1), None)
    assert split(range(2), target_on_cpu=False, draft_on_cpu=False) == Cores(None, None)


def test_of_two_hyperthreads_one_is_used() -> None:
    assert without_siblings({0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"}) == [0, 1]
    assert without_siblings({0: "0-1", 1: "0-1"}) == [0, 1]
