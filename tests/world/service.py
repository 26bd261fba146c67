"""The draft service of a simulated world: the real one, whose two threads the schedule drives, and its disk."""

from __future__ import annotations

import errno
import io
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from specbranch.service.server.handler import Answer
from specbranch.service.server.recorder import EventSink, TraceRecorder
from specbranch.service.server.server import Server, ServiceOptions
from specbranch.service.server.timeline_recorder import TimelineRecorder
from tests.world.engine import WorldEngine
from tests.world.faults import Limits
from tests.world.network import Network, WorldRouter
from tests.world.schedule import Actor, Clock, Schedule

_POLL_S = 0.5
_LATENCY_S = 0.0003  # of a thread that is woken
MAX_EVENTS = 300  # of a timeline


class _Server(Server):
    """Tells the schedule, in place of a socket, that there is something to look at."""

    def __init__(self, *parts: Any, look: Callable[[float], None]) -> None:
        self._look = look
        super().__init__(*parts)

    def _wake(self) -> None:
        super()._wake()
        self._look(0.0)


class Service:
    """One life of the service, from its start to its end. `turned` is called after every turn of the lookup thread."""

    def __init__(
        self, schedule: Schedule, clock: Clock, rng: random.Random, disk: Disk, limits: Limits, network: Network
    ) -> None:
        self._schedule = schedule
        self._clock = clock
        self._rng = rng
        self._network = network
        self._is_idle = False
        self._hangs_until_s = 0.0
        self._look_s = math.inf  # when the lookup thread looks next
        self.is_up = True
        self.is_touched = True  # since it was last checked
        self.turned: Callable[[], None] = lambda: None
        self.limits = limits
        self.engine = WorldEngine(rng, limits.max_handles, limits.max_tokens, self._run_step)
        self.timeline = TimelineRecorder(MAX_EVENTS)
        self.recorder = TraceRecorder(
            Path("no such file"), "scripted", wall_ns=clock.wall_ns, open_file=lambda path, mode: disk.open()
        )
        self._observer = EventSink(self.timeline, self.recorder)
        options = ServiceOptions(
            "world", None, limits.max_sessions, limits.max_session_tokens, prefill_chunk=rng.choice([4, 16, 64])
        )
        self.server = _Server(self.engine, options, self._observer, clock, clock, look=self.look)
        self.router: WorldRouter | None = None
        self._runner = Actor(schedule, self._draft)

    def listen(self, router: WorldRouter) -> None:
        self.router = router
        self._network.open(router)

    def tell_of_served(self, hear: Callable[[bytes, bytes], None]) -> None:
        """Call `hear` with each message when the service handles it, which may be after it waited for its turn."""
        handle = self.server.handler.handle

        def tell(client: bytes, frames: Sequence[bytes], user: bytes = b"") -> Iterator[Answer]:
            hear(client, frames[0])
            return handle(client, frames, user)

        self.server.handler.handle = tell  # type: ignore[method-assign]

    def end(self, is_orderly: bool) -> None:
        """Stop or kill the service; it forgets everything."""
        self.is_up = False
        self._runner.end()
        if is_orderly:
            self._observer.close()
        self._network.shut()

    def hang(self, seconds: float) -> None:
        self._hangs_until_s = self._clock.now_s + seconds

    def look(self, delay_s: float) -> None:
        """Let the lookup thread take a turn by then."""
        delay_s += self._rng.random() * _LATENCY_S
        if self._clock.now_s + delay_s < self._look_s:
            self._look_s = self._clock.now_s + delay_s
            self._schedule.after(delay_s, self._turn)

    def settle(self) -> None:
        """Forget all sessions and give everything back, once no client is left."""
        store = self.server.store
        for session in store.snapshot():
            store.drop(session)
        self._runner.end()
        self.server.runner.run_step()

    @property
    def _stall_s(self) -> float:
        return max(self._hangs_until_s - self._clock.now_s, 0.0)

    def _turn(self) -> None:
        if not self.is_up or self.router is None:
            return
        self._look_s = math.inf
        if self._stall_s:
            self.look(self._stall_s)
            return
        self.is_touched = True
        self.server.turn(self.router)
        self.turned()
        if self._is_idle:
            self._is_idle = False
            self._runner.wake(self._rng.random() * _LATENCY_S)
        deadline_s = self.server.handler.next_deadline_s()
        left_s = _POLL_S if deadline_s is None else min(max(deadline_s - self._clock.now_s, 0.0), _POLL_S)
        self.look(0.0 if self.router.inbox else left_s)

    def _draft(self) -> None:
        """Draft until the world ends, as the draft thread does."""
        while True:
            self.is_touched = True
            if self.server.runner.run_once():
                self._runner.wait(self._rng.random() * _LATENCY_S)
            else:
                self._is_idle = True
                self._runner.wait(None)

    def _run_step(self, step_s: float) -> None:
        """Let the engine compute for this time, while others go on."""
        self._runner.wait(step_s)
        if self._stall_s:
            self._runner.wait(self._stall_s)
        self.is_touched = True


class Disk:
    """A disk with one trace file, which outlives the service, and no room while the world wants it so."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.is_full = False

    def open(self) -> io.BufferedWriter:
        """Open the file to append to it."""
        return io.BufferedWriter(_File(self))


class _File(io.RawIOBase):
    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        taken = bytes(data)
        if self._disk.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._disk.content += taken
        return len(taken)

    def truncate(self, size: int | None = None) -> int:
        assert size is not None
        del self._disk.content[size:]
        return size
