"""The draft service as a running thing: one socket, a lookup thread (the caller's) and a compute thread."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import zmq

from specbranch.engines.protocol import DraftEngine, EngineInfo
from specbranch.service.compute import Compute
from specbranch.service.dispatch import Answer, Dispatch
from specbranch.service.endpoint import ServiceKeys, listening
from specbranch.service.observer import Observer
from specbranch.service.sessions import SessionStore
from specbranch.service.wire import VERSION, encode
from specbranch.version import __version__

log = logging.getLogger(__name__)

_WAKE = "inproc://wake"
_POLL_MS = 500
# Python lets a thread keep the interpreter for 5 ms; a lookup must not wait that long while the other thread plans.
_SWITCH_S = 0.0001


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Where to listen, how much to remember, and how many tokens of a sequence are prefilled at a time.

    `piece_len` None: few on a CPU, where a token costs milliseconds, and many elsewhere. `engine` and `heads` are only
    told to who asks what runs here.
    """

    address: str
    keys: ServiceKeys | None = None
    max_sessions: int = 256
    max_session_tokens: int = 4_000_000
    piece_len: int | None = None
    engine: str = ""
    heads: str = ""


class Router(Protocol):
    """What a turn needs of the socket that all clients are connected to; ZeroMQ's, or a test's."""

    def recv_multipart(self, flags: int, /) -> list[bytes]:
        """A client and the frames of its message; raises `zmq.Again` if there is none."""
        ...

    def send_multipart(self, frames: Sequence[bytes], flags: int, /) -> object:
        """Send frames to the client that the first one names; raises `zmq.ZMQError` if that cannot be done now."""
        ...


class Server:
    """Serves until `stop`. `stop` may be called from a signal handler or another thread.

    An observer with a timeline has it complete once `serve` has returned; a recorder writes as it goes.
    """

    def __init__(
        self,
        engine: DraftEngine,
        options: ServiceOptions,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._observer = observer or Observer()
        self._options = options
        self._clock = clock
        self._wake_sender: zmq.Socket[bytes] | None = None
        self._is_woken = False
        self._is_stopping = False
        self.store = SessionStore(options.max_sessions, options.max_session_tokens)
        piece_len = options.piece_len or (32 if engine.info.device == "cpu" else 512)
        self.compute = Compute(engine, self.store, self._wake, clock, self._observer, piece_len)
        settings = _settings(engine.info, options, piece_len)
        self.dispatch = Dispatch(engine, self.store, self.compute, self._observer, clock, settings)

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
            with listening(context, self._options.address, self._options.keys) as router:
                self.compute.start()
                log.info("listening at %s", self._options.address)
                self._loop(router, wake)
        finally:
            self.compute.stop()
            self._observer.close()
            wake.close()
            self._wake_sender.close()
            context.term()
            self._engine.shutdown()
            log.info("stopped")

    def turn(self, router: Router) -> None:
        """One turn of the lookup thread: take in what has come, and answer. What can wait comes last."""
        is_woken, self._is_woken = self._is_woken, False  # before the drafts are looked at: none is overlooked
        self._receive(router)
        if is_woken:
            self._send(router, self.dispatch.answer_ready())
        self._send(router, self.dispatch.answer_overdue())
        if is_woken:
            self._send(router, self.dispatch.tell_ahead())
        self._observer.flush()

    def _loop(self, router: zmq.Socket[bytes], wake: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(wake, zmq.POLLIN)
        while not self._is_stopping:
            if not self.compute.is_alive:
                raise RuntimeError("the compute thread has ended and nothing is drafted; start the service again")
            if wake in dict(poller.poll(self._timeout_ms())):
                wake.recv()
            self.turn(router)

    def _timeout_ms(self) -> int:
        deadline_s = self.dispatch.next_deadline_s()
        if deadline_s is None:
            return _POLL_MS
        return min(max(math.ceil((deadline_s - self._clock()) * 1000), 0), _POLL_MS)

    def _receive(self, router: Router) -> None:
        # A few at a time, so that a flood from one client cannot keep deadlines from being met.
        for _ in range(64):
            try:
                client, *frames = router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._send(router, self.dispatch.handle(client, frames))

    def _send(self, router: Router, answers: Iterable[Answer]) -> None:
        for client, reply in answers:
            try:
                router.send_multipart((client, encode(reply)), zmq.NOBLOCK)
            except zmq.ZMQError as error:
                log.debug("an answer found no client: %s", error)

    def _wake(self) -> None:
        """Called by the compute thread. One wake-up in the pipe is enough."""
        self._is_woken = True
        if self._wake_sender is not None:
            with contextlib.suppress(zmq.Again):
                self._wake_sender.send(b"", zmq.NOBLOCK)


def _settings(info: EngineInfo, options: ServiceOptions, piece_len: int) -> dict[str, str | int]:
    """How a service was started; what is not known is left out."""
    settings: dict[str, str | int] = {
        "version": __version__,
        "wire": VERSION,
        "model": info.model[-256:],
        "engine": options.engine,
        "device": info.device,
        "dtype": info.dtype,
        "heads": options.heads[-256:],
        "weight_bytes": info.weight_bytes or 0,
        "vocab_len": info.vocab_len,
        "cache_tokens": info.max_tokens,
        "max_handles": info.max_handles,
        "row_limit": info.row_limit,
        "max_sessions": options.max_sessions,
        "max_session_tokens": options.max_session_tokens,
        "piece_len": piece_len,
    }
    return {name: value for name, value in settings.items() if value}
