"""How long an engine step took, and whether it can be compared with others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence


class Pace:
    """Called once after every step. Only steps that decode the same rows as the one before can be compared."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_s = clock()
        self._lengths: list[int] = []  # sorted

    def step_s(self, num_new: Sequence[int], lengths: Sequence[int]) -> float | None:
        """Seconds since the last step; None if rows came, left or were in prefill.

        `num_new`: new tokens of each row, 0 in prefill; `lengths`: lengths of the rows that have new ones. Rows have
        no ids here, so they are recognised by their lengths.
        """
        now_s = self._clock()
        elapsed_s, self._last_s = now_s - self._last_s, now_s
        is_same = False
        if all(num_new):
            is_same = sorted(length - new for length, new in zip(lengths, num_new, strict=True)) == self._lengths
        self._lengths = sorted(lengths)
        return elapsed_s if is_same else None
