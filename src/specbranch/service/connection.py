"""A client's end of the wire: messages out, replies in, and nothing that the other side does can hold it up.

ZeroMQ connects by itself, again and again. It gives up for good on a peer that breaks a rule, such as the bound on
frames, so a connection over which nothing can be sent is made anew from time to time. The directory of a Unix socket
is looked at again then.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator

from specbranch.logs import Seldom
from specbranch.service.endpoint import EndpointError
from specbranch.service.link import Link
from specbranch.service.wire import FrameError, Refused, Reply, Request, decode_reply, encode

log = logging.getLogger(__name__)

_MOST_IN_A_ROW = 256  # frames without a pause; a service that woke up has so many late answers, a flood has more
_RENEWAL_S = 5.0  # without anybody to send to; longer than a handshake takes


class Connection:
    """Messages over one link. One thread at a time may use it, and only the process that made it."""

    def __init__(self, link: Link, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._clock = clock
        self._pid = os.getpid()
        self._is_fork_told = False
        self._warn = Seldom(log, clock)
        self._num_in_a_row = 0
        self._since_s = clock()

    def is_ours(self) -> bool:
        """Whether this process made the connection; a fork of it must not touch the socket, and is told so once."""
        if os.getpid() == self._pid:
            return True
        if not self._is_fork_told:
            self._is_fork_told = True
            log.warning("a forked process cannot use its parent's connection to the draft service; make a new client")
        return False

    def send(self, message: Request) -> bool:
        """Whether the message is on its way; False, at once, if there is nobody to send it to."""
        if self._link.send(encode(message)):
            return True
        if self._clock() - self._since_s > _RENEWAL_S:
            self._renew()
        return False

    def await_writable(self, timeout_s: float) -> None:
        """Wait until something can be sent, or the time is up."""
        self._link.await_writable(timeout_s)

    def replies(self, end_s: float, waits: bool = True) -> Iterator[Reply | None]:
        """Replies as they come, until then, or those that are here already; None for what is no reply.

        Who sends so fast that there always is one more is no service, and is dropped.
        """
        while (frames := self._receive(end_s if waits else 0.0)) is not None:
            if self._num_in_a_row == _MOST_IN_A_ROW:
                self._warn("the draft service sends more than can be taken in; connecting anew")
                self._renew()
                return
            self._num_in_a_row += 1
            yield self._read(frames)
            if self._clock() >= end_s:
                return

    def close(self) -> None:
        """Let go of the connection; nothing that is still queued is waited for. A fork leaves its parent's alone."""
        self._link.close()

    def _receive(self, end_s: float) -> list[bytes] | None:
        """What is here, or comes until then. To try costs less than to ask first."""
        frames = self._link.receive()
        if frames is not None:
            return frames
        self._num_in_a_row = 0
        left_s = end_s - self._clock()
        return self._link.receive() if left_s > 0 and self._link.await_readable(left_s) else None

    def _read(self, frames: list[bytes]) -> Reply | None:
        try:
            if len(frames) != 1:
                raise FrameError(f"a message of {len(frames)} frames; one is taken")
            reply = decode_reply(frames[0])
        except FrameError as error:
            self._warn("the draft service sent what is no message: %.200r", str(error))
            return None
        if isinstance(reply, Refused):
            self._warn("the draft service refused: %.200r", reply.reason)
        return reply

    def _renew(self) -> None:
        self._num_in_a_row = 0
        self._since_s = self._clock()
        try:
            self._link.renew()
        except EndpointError as error:
            self._warn("no connection to the draft service: %s", error)
