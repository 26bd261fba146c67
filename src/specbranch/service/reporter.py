"""Asks a draft service for the figures of one namespace, for whoever shows them. It never raises and never waits long.

A connection of its own, apart from the one that drafts come through. A service that does not answer is waited for once;
from then on it is asked, but not waited for, until an answer comes.
"""

from __future__ import annotations

import enum
import logging
import math
import time
from typing import Any

import zmq

from specbranch.service.endpoint import ClientKeys, close_with, connected
from specbranch.service.wire import Figures, FrameError, Report, decode_reply, encode

log = logging.getLogger(__name__)


_PATIENCE_S = 1.0  # a question that stays open for longer is met with silence


class Reach(enum.Enum):
    """How a service was found when it was last asked."""

    ANSWERS = "answers"
    LATE = "late"  # no answer yet: a busy machine, or the beginning of a silence
    SILENT = "silent"  # it is connected and says nothing
    ABSENT = "absent"  # nobody listens


class Reporter:
    """One connection to a draft service. One thread at a time may use it."""

    def __init__(self, address: str, namespace: bytes, keys: ClientKeys | None = None) -> None:
        self._namespace = namespace
        context: zmq.Context[Any] = zmq.Context()
        try:
            self._socket = connected(context, address, keys)
        except BaseException:
            context.destroy(linger=0)
            raise
        self._close = close_with(self, context, self._socket)
        self._round = 0
        self._is_new = True
        self._open_s: float | None = None  # when the oldest question was asked that is still open
        self.figures: Figures | None = None

    def ask(self, timeout_s: float) -> Reach:
        """Bring `figures` up to date if that can be done in time; they stay as they were if not."""
        try:
            return self._ask(timeout_s)
        except Exception:
            log.exception("the draft service could not be asked for its figures")
            return Reach.ABSENT

    def close(self) -> None:
        """Let go of the connection."""
        self._close()

    def _ask(self, timeout_s: float) -> Reach:
        now_s = time.monotonic()
        end_s = now_s + timeout_s
        while self._socket.poll(0):
            self._receive()  # an answer that came too late; it still is the newest we have
        self._round += 1
        if self._is_new:
            # Connecting happens in the background; the first question must not come too early.
            self._socket.poll(math.ceil(timeout_s * 1000), zmq.POLLOUT)
            self._is_new = False
        try:
            self._socket.send(encode(Report(self._round, self._namespace)), zmq.NOBLOCK)
        except zmq.Again:
            self._open_s = None
            return Reach.ABSENT
        if self._open_s is not None:
            return Reach.SILENT if now_s - self._open_s > _PATIENCE_S else Reach.LATE
        while (left_s := end_s - time.monotonic()) > 0:
            if self._socket.poll(math.ceil(left_s * 1000)) and self._receive() == self._round:
                return Reach.ANSWERS
        self._open_s = now_s
        return Reach.LATE

    def _receive(self) -> int | None:
        """Take in one message; the round that it answers, None if it is no answer."""
        frames = self._socket.recv_multipart(zmq.NOBLOCK)
        self._open_s = None
        try:
            reply = decode_reply(b"".join(frames))
        except FrameError as error:
            log.warning("the service sent what is no message: %s", error)
            return None
        if not isinstance(reply, Figures):
            # A service of an older release knows no reports. It is there, though, and drafts.
            return self._round
        self.figures = reply
        return reply.round
