"""The running draft service: a socket, a lookup thread (the caller's), which serves the clients, and a draft thread.

Messages wait in a fair queue until it is their client's turn; replies that are due are sent between two messages.
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
from specbranch.service.server.handler import Answer, HandlerOptions, RequestHandler
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
_MAX_SERVING_S = 0.005  # before the socket is read again
_MAX_RECEIVED, _MAX_RECEIVED_IF_FULL = 64, 8  # messages, before the next one is served
_FULL_QUEUE = 2048  # messages
_CHECK_S = 1.0  # between two checks of the socket's file, and of the clients' keys
_STOP_S = 5.0  # for the step that is running when the service stops


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Where to listen, how many sessions to keep, and how many tokens of a sequence to prefill at a time.

    `prefill_chunk` None means 32 tokens on a CPU, where a token costs milliseconds, and 512 elsewhere. `engine` is a
    name, only shown to clients that ask for the settings. No reply is held back longer than `max_wait_s`.
    """

    address: str
    keys: ServiceKeys | None = None
    max_sessions: int = 256
    max_session_tokens: int = 4_000_000
    prefill_chunk: int | None = None
    engine: str = ""
    max_wait_s: float = 1.0


class Router(Protocol):
    """Interface of the socket that all clients are connected to: a `Listener`, or a fake one in tests."""

    def receive(self) -> Message:
        """Return the next message; raise `zmq.Again` if there is none."""
        ...

    def send(self, client: bytes, frame: bytes) -> None:
        """Send a frame to a client; raise `zmq.ZMQError` if that is not possible now."""
        ...


class Server:
    """The draft service: serves clients until `stop`, which a signal handler or another thread may call.

    If the `observer` has a timeline, it is complete when `serve` returns; a trace is written while the service runs.
    """

    def __init__(
        self,
        engine: DraftEngine,
        options: ServiceOptions,
        observer: EventSink | None = None,
        clock: Callable[[], float] = time.monotonic,
        work_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """Create the service; `work_clock` returns the thread's CPU time, which is charged to the client served."""
        self._engine = engine
        self._observer = observer
        self._options = options
        self._clock = clock
        self._work_clock = work_clock
        self._wake_sender: zmq.Socket[bytes] | None = None
        self._is_woken = False
        self._is_stopping = False
        self.store = SessionStore(options.max_sessions, options.max_session_tokens)
        prefill_chunk = options.prefill_chunk or (32 if engine.info.device == "cpu" else 512)
        self.runner = DraftRunner(engine, self.store, self._wake, clock, self._observer, prefill_chunk)
        handler_options = HandlerOptions(
            settings=_settings(engine.info, options, prefill_chunk),
            max_wait_s=options.max_wait_s,
            owner=options.keys.owner if options.keys else lambda: b"",
        )
        self.handler = RequestHandler(engine, self.store, self.runner, self._observer, clock, handler_options)
        self._queue = FairQueue(clock)
        self._checked_s = clock()

    def stop(self) -> None:
        """Make `serve` return after its present iteration."""
        self._is_stopping = True

    def reload_keys(self) -> None:
        """Read the clients' keys again at the next iteration, if their files have changed."""
        self._checked_s = -math.inf

    def serve(self) -> None:
        """Listen and serve clients until `stop`; then end the draft thread, close the sockets and shut down the engine.

        If the draft thread does not finish its step within 5 s, end the process.
        """
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
            if self._observer is not None:
                self._observer.close()
            if not has_ended:
                log.error(
                    "the draft engine has not finished its step within %g s; the service exits without it", _STOP_S
                )
                os._exit(1)
            wake.close()
            self._wake_sender.close()
            context.term()
            self._engine.shutdown()
            log.info("stopped")

    def turn(self, router: Router) -> None:
        """Serve clients for one iteration: handle messages, send due replies, then send prefetched drafts."""
        is_woken = self._is_woken
        if is_woken:
            self._is_woken = False  # first, so that a draft step which ends now wakes this thread again
        self._receive(router)
        self._serve_messages(router)
        if is_woken:
            self._send(router, self.handler.answer_ready())
        self._send(router, self.handler.answer_overdue())
        if is_woken:
            self._send(router, self.handler.push_prefetched())
        if self._observer is not None:
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
        """Raise if the engine or the draft thread has failed.

        Once a second, check the clients' keys and the socket's file: bind again if it was deleted, raise if another
        service has replaced it.
        """
        if self.runner.engine_failed:
            raise EngineError("the draft engine fails at every step; see the first error above, and start it again")
        if not self.runner.is_alive:
            raise RuntimeError("the draft thread has ended and nothing is drafted; start the service again")
        if self._clock() - self._checked_s >= _CHECK_S:
            self._checked_s = self._clock()
            listener.check()

    def _timeout_ms(self) -> int:
        if self._queue.num_messages:
            return 0
        deadline_s = self.handler.next_deadline_s()
        if deadline_s is None:
            return _POLL_MS
        return min(max(math.ceil((deadline_s - self._clock()) * 1000), 0), _POLL_MS)

    def _receive(self, router: Router) -> None:
        for _ in range(_MAX_RECEIVED if self._queue.num_messages < _FULL_QUEUE else _MAX_RECEIVED_IF_FULL):
            try:
                self._queue.push(router.receive())
            except zmq.Again:
                break
        self.handler.counts.dropped = self._queue.num_dropped

    def _serve_messages(self, router: Router) -> None:
        """Serve queued messages for about 5 ms at most, so that replies held back still meet their deadlines."""
        start_s = now_s = self._clock()
        while now_s - start_s < _MAX_SERVING_S and (message := self._queue.pop()) is not None:
            before_s = self._work_clock()
            self._send(router, self.handler.handle(message.client, message.frames, message.user))
            self._queue.charge(message.client, self._work_clock() - before_s)
            now_s = self._clock()

    def _send(self, router: Router, answers: Iterable[Answer]) -> None:
        for client, reply in answers:
            try:
                router.send(client, encode(reply, self.handler.lookup.tenants.version(client)))
            except zmq.ZMQError as error:
                log.debug("an answer was not sent, because its client has gone: %s", error)

    def _wake(self) -> None:
        """Wake the thread that serves clients, unless a wake-up is pending (full pipe). Called by the draft thread."""
        self._is_woken = True
        if self._wake_sender is not None:
            with contextlib.suppress(zmq.Again):
                self._wake_sender.send(b"", zmq.NOBLOCK)


def _settings(info: EngineInfo, options: ServiceOptions, prefill_chunk: int) -> dict[str, str | int]:
    """Return the settings that a service was started with, by name, without unknown (empty or zero) values."""
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
