"""What happens next in a simulated world: events in the order of their times, and code that waits, one piece at a time.

Only one thing runs at any moment. Code that blocks, such as a client's call, has a thread to keep its stack in, which
runs only while the schedule waits for it.
"""

from __future__ import annotations

import heapq
import random
import threading
from collections.abc import Callable


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
        """Let everything stand still for these seconds, and notice afterwards."""
        self.now_s += seconds
        self.leapt_s += seconds

    def set_wall(self, change_s: float) -> None:
        self._wall_offset_s += change_s


class Schedule:
    """Events by time; those of the same time come in random order."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self._clock = clock
        self._rng = rng
        self._events: list[tuple[float, float, int, Callable[[], None]]] = []
        self._num_events = 0

    @property
    def now_s(self) -> float:
        return self._clock.now_s

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        self._num_events += 1
        event = (self._clock.now_s + delay_s, self._rng.random(), self._num_events, act)
        heapq.heappush(self._events, event)

    def step(self) -> None:
        """Let the next event happen."""
        at_s, _, _, act = heapq.heappop(self._events)
        self._clock.now_s = max(self._clock.now_s, at_s)
        act()


class Ended(BaseException):
    """Unwinds an actor that is ended; nothing that contains faults must stop it."""


class Actor:
    """Code that waits: it runs from one wait to the next, while all others stand still."""

    def __init__(self, schedule: Schedule, act: Callable[[], None]) -> None:
        self._schedule = schedule
        self._act = act
        self._mine, self._theirs = threading.Lock(), threading.Lock()
        self._mine.acquire()
        self._theirs.acquire()
        self._wait = 0  # tells waits apart: an event for an earlier one comes too late
        self._is_ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.wake()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None) -> None:
        """Wait, from the actor's own code, until something wakes it or the time is up."""
        self._wait += 1
        if timeout_s is not None:
            self.wake(timeout_s)
        self._theirs.release()
        self._mine.acquire()
        if self._is_ended:
            raise Ended

    def wake(self, delay_s: float = 0.0) -> None:
        """Let it go on then, if it still waits."""
        wait = self._wait
        self._schedule.after(delay_s, lambda: self._resume(wait))

    def end(self) -> None:
        """Make it stop waiting and do nothing more."""
        self._is_ended = True
        self._resume(self._wait)
        self._thread.join()

    def _resume(self, wait: int) -> None:
        if wait != self._wait or self.is_over:
            return
        self._mine.release()
        self._theirs.acquire()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        self._mine.acquire()
        try:
            if not self._is_ended:
                self._act()
        except Ended:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._wait += 1
            self._theirs.release()
