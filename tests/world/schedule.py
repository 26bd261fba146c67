"""What happens next in a simulated world: events in the order of their times, and code that waits, one piece at a time.

Only one thing runs at any moment. Code that blocks, such as a client's call, has a thread to keep its stack in, which
runs only while the schedule waits for it.
"""

from __future__ import annotations

import heapq
import random
import threading
from collections.abc import Callable

from tests.world.clock import Clock


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
        """Called by its own code: until it is woken, or the time is up."""
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
        """It waits no more and does nothing more."""
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
