"""The draft service as a running thing: one socket, a lookup thread (the caller's) and a draft thread.

Messages wait in `turns` until it is their client's turn; between two of them answers that are due go out.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import zmq

from specbranch.engines.base import DraftEngine, EngineInfo
from specbranch.errors import EngineError
from specbranch.service.server.draft_runner import DraftRunner
from specbranch.service.server.fair_queue import FairQueue, Message
from specbranch.service.server.handler import Answer, RequestHandler
from specbranch.service.server.listener import Listener, listening, raise_fd_limit
from specbranch.service.server.recorder import EventSink
from specbranch.service.server.store import SessionStore
from specbranch.service.wire.addresses import ServiceKeys
from specbranch.service.wire.messages import VERSION, encode
from specbranch.version import __version__

log = logging.getLogger(__name__)

_WAKE = "inproc://wake"
_POLL_MS = 500
# Python lets a thread keep the interpreter for 5 ms; a lookup must not wait that long while the other thread plans.
_SWITCH_S = 0.0001
_TURNS_S = 0.005  # of messages, before the socket is looked at again
_MAX_RECEIVED, _FEW_RECEIVED = 64, 8  # messages, before the first of them is served; the second where many wait
_MANY = 2048
_CHECK_S = 1.0  # between two looks at the socket's file
_STOP_S = 5.0  # for the step under way when the service ends


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Where to listen, how much to remember, and how many tokens of a sequence are prefilled at a time.

    `prefill_chunk` None: few on a CPU, where a token costs milliseconds, and many elsewhere. `engine` is only told
    to who asks what runs here. `max_wait_s`: no answer is held back longer, whatever its client asks for.
    """

    address: str
    keys: ServiceKeys | None = None
    max_sessions: int = 256
    max_session_tokens: int = 4_000_000
    prefill_chunk: int | None = None
    engine: str = ""
    max_wait_s: float = 1.0


class Router(Protocol):
    """What a turn needs of the socket that all clients are connected to: a `Listener`, or a test's."""

    def receive(self) -> Message:
        """The next message; raises `zmq.Again` if there is none."""
        ...

    def send(self, client: bytes, frame: bytes) -> None:
        """Send a frame to a client; raises `zmq.ZMQError` if that cannot be done now."""
        ...


class Server:
    """Serves until `stop`. `stop` may be called from a signal handler or another thread.

    An observer with a timeline has it complete once `serve` has returned; a recorder writes as it goes.
    """

    def __init__(
        self,
        engine: DraftEngine,
        options: ServiceOptions,
        observer: EventSink | None = None,
        clock: Callable[[], float] = time.monotonic,
        work_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`work_clock`: what clients are charged by, the time that this thread has worked."""
        self._engine = engine
        self._observer = observer or EventSink()
        self._options = options
        self._clock = clock
        self._work_clock = work_clock
        self._wake_sender: zmq.Socket[bytes] | None = None
        self._is_woken = False
        self._is_stopping = False
        self.store = SessionStore(options.max_sessions, options.max_session_tokens)
        prefill_chunk = options.prefill_chunk or (32 if engine.info.device == "cpu" else 512)
        self.runner = DraftRunner(engine, self.store, self._wake, clock, self._observer, prefill_chunk)
        settings = _settings(engine.info, options, prefill_chunk)
        self.handler = RequestHandler(
            engine,
            self.store,
            self.runner,
            self._observer,
            clock,
            settings,
            options.max_wait_s,
            options.keys.owner() if options.keys else b"",
        )
        self._turns = FairQueue(clock)
        self._checked_s = clock()

    def stop(self) -> None:
        """End soon."""
        self._is_stopping = True

    def serve(self) -> None:
        """Listen and answer until stopped; then close everything."""
        sys.setswitchinterval(_SWITCH_S)
        context: zmq.Context[Any] = zmq.Context()
        wake = context.socket(zmq.PULL)
        wake.bind(_WAKE)
        self._wake_sender = context.socket(zmq.PUSH)
        self._wake_sender.setsockopt(zmq.SNDHWM, 1)
        self._wake_sender.setsockopt(zmq.LINGER, 0)
        self._wake_sender.connect(_WAKE)
        try:
            raise_fd_limit()
            with listening(context, self._options.address, self._options.keys) as listener:
                self.runner.start()
                log.info("listening at %s", self._options.address)
                self._loop(listener, wake)
        finally:
            has_ended = self.runner.stop(_STOP_S)
            self._observer.close()
            if not has_ended:
                log.error("the draft engine has not come back from a step within %g s; ending without it", _STOP_S)
                os._exit(1)
            wake.close()
            self._wake_sender.close()
            context.term()
            self._engine.shutdown()
            log.info("stopped")

    def turn(self, router: Router) -> None:
        """One turn of the lookup thread: take in what has come, and answer. What can wait comes last."""
        is_woken = self._is_woken
        if is_woken:
            self._is_woken = False  # before the drafts are looked at: none is overlooked
        self._receive(router)
        self._take_turns(router)
        if is_woken:
            self._send(router, self.handler.answer_ready())
        self._send(router, self.handler.answer_overdue())
        if is_woken:
            self._send(router, self.handler.push_prefetched())
        self._observer.flush()

    def _loop(self, listener: Listener, wake: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(listener.socket, zmq.POLLIN)
        poller.register(wake, zmq.POLLIN)
        while not self._is_stopping:
            self._check(listener)
            if wake in dict(poller.poll(self._timeout_ms())):
                wake.recv()
            self.turn(listener)

    def _check(self, listener: Listener) -> None:
        """End the service where it cannot go on."""
        if self.runner.engine_failed:
            raise EngineError("the draft engine fails at every step; see the first error above, and start it again")
        if not self.runner.is_alive:
            raise RuntimeError("the draft thread has ended and nothing is drafted; start the service again")
        if self._clock() - self._checked_s >= _CHECK_S:
            self._checked_s = self._clock()
            listener.check()

    def _timeout_ms(self) -> int:
        if len(self._turns):
            return 0
        deadline_s = self.handler.next_deadline_s()
        if deadline_s is None:
            return _POLL_MS
        return min(max(math.ceil((deadline_s - self._clock()) * 1000), 0), _POLL_MS)

    def _receive(self, router: Router) -> None:
        for _ in range(_MAX_RECEIVED if len(self._turns) < _MANY else _FEW_RECEIVED):
            try:
                self._turns.push(router.receive())
            except zmq.Again:
                break
        self.handler.counts.dropped = self._turns.num_dropped

    def _take_turns(self, router: Router) -> None:
        """Serve messages for a while, so that a flood cannot keep deadlines from being met."""
        start_s = now_s = self._clock()
        while now_s - start_s < _TURNS_S and (message := self._turns.pop()) is not None:
            before_s = self._work_clock()
            self._send(router, self.handler.handle(message.client, message.frames, message.user))
            self._turns.charge(message.client, self._work_clock() - before_s)
            now_s = self._clock()

    def _send(self, router: Router, answers: Iterable[Answer]) -> None:
        for client, reply in answers:
            try:
                router.send(client, encode(reply))
            except zmq.ZMQError as error:
                log.debug("an answer found no client: %s", error)

    def _wake(self) -> None:
        """Called by the draft thread. One wake-up in the pipe is enough."""
        self._is_woken = True
        if self._wake_sender is not None:
            with contextlib.suppress(zmq.Again):
                self._wake_sender.send(b"", zmq.NOBLOCK)


def _settings(info: EngineInfo, options: ServiceOptions, prefill_chunk: int) -> dict[str, str | int]:
    """How a service was started; what is not known is left out."""
    settings: dict[str, str | int] = {
        "version": __version__,
        "wire": VERSION,
        "model": info.model[-256:],
        "engine": options.engine,
        "device": info.device,
        "dtype": info.dtype,
        "weight_bytes": info.weight_bytes or 0,
        "vocab_len": info.vocab_len,
        "cache_tokens": info.max_tokens,
        "max_handles": info.max_handles,
        "row_limit": info.row_limit,
        "max_sessions": options.max_sessions,
        "max_session_tokens": options.max_session_tokens,
        "prefill_chunk": prefill_chunk,
    }
    return {name: value for name, value in settings.items() if value}
