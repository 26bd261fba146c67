"""The time of a simulated world. It passes only when the schedule says so."""

from __future__ import annotations


class Clock:
    """A monotonic clock, which may leap forward, and a wall clock, which may be set to anything."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.leapt_s = 0.0  # of all leaps so far
        self._wall_offset_s = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now_s

    def wall_ns(self) -> int:
        return int(1e9 * (self.now_s + self._wall_offset_s))

    def leap(self, seconds: float) -> None:
        """All stand still for so long, and notice afterwards."""
        self.now_s += seconds
        self.leapt_s += seconds

    def set_wall(self, change_s: float) -> None:
        self._wall_offset_s += change_s
