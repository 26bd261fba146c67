"""The client's ZeroMQ socket: send and receive frames, detect a lost connection and reconnect.

A `Transport` reads no clock and decodes no message, so that tests can put another transport in its place.

ZeroMQ retries failed connects, but never reconnects to a peer that has violated the protocol, for example the limit on
frame size. So if nothing can be sent, the client opens a new socket, at most every five seconds. The directory of a
Unix socket is checked again each time.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec
import zmq
import zmq.auth

from specbranch.logs import RateLimitedWarning
from specbranch.service.wire.addresses import (
    _BEAT_MS,
    _DEAD_MS,
    LINGER_MS,
    AddressError,
    ClientKeys,
    _curve_keys,
    is_trusted_socket,
    socket_path,
)
from specbranch.service.wire.messages import MAX_REPLY, OLDEST_VERSION, Reply, Request, encode

log = logging.getLogger(__name__)
_MAX_BATCH = 16  # messages that are taken from a transport at once, which is what a socket holds
_MAX_IN_A_ROW = 256  # messages without a pause; a service that was stopped may send as many late, a flood has more
_RENEWAL_S = 5.0  # without a service to send to, until the connection is made anew; longer than a handshake takes
_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class Transport(Protocol):
    """Interface of a connection that reconnects to its service. Methods raise only what their docstrings name."""

    def send(self, frame: bytes) -> bool:
        """Send a frame without waiting; return False if that is impossible, as when no service is connected."""
        ...

    def receive(self, max_messages: int) -> list[list[bytes]]:
        """Return up to `max_messages` messages that have arrived, each as a list of frames, without waiting."""
        ...

    def await_readable(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for a message; return whether one has arrived."""
        ...

    def await_writable(self, timeout_s: float) -> None:
        """Wait until a message can be sent, at most `timeout_s`; return in either case."""
        ...

    def reconnect(self) -> None:
        """Connect anew, with the keys as their files are now.

        Raise `AddressError` if another user could listen at the address, or if the keys cannot be read.
        """
        ...

    def close(self) -> None:
        """Close the connection and drop queued messages."""
        ...


class ZmqTransport:
    """A transport over one ZeroMQ DEALER socket. Closing it in a forked process leaves the parent's socket alone."""

    def __init__(self, address: str, keys: ClientKeys | None = None) -> None:
        self._address = address
        self._keys = keys
        context: zmq.Context[Any] = zmq.Context()
        try:
            self._socket = dealer_socket(context, address, keys)
        except BaseException:
            context.destroy(linger=0)
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        # The finalizer holds the socket too: a context that is garbage-collected before its socket waits forever.
        self._close = weakref.finalize(self, _close, context, self._socket, os.getpid())

    def send(self, frame: bytes) -> bool:
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, max_messages: int) -> list[list[bytes]]:
        messages: list[list[bytes]] = []
        with contextlib.suppress(zmq.Again):
            while len(messages) < max_messages:
                messages.append(self._socket.recv_multipart(zmq.NOBLOCK))
        return messages

    def await_readable(self, timeout_s: float) -> bool:
        return bool(self._poller.poll(math.ceil(timeout_s * 1000)))

    def await_writable(self, timeout_s: float) -> None:
        self._socket.poll(math.ceil(timeout_s * 1000), zmq.POLLOUT)

    def reconnect(self) -> None:
        with contextlib.suppress(zmq.ZMQError):  # it was not connected
            self._socket.disconnect(self._address)
        _use_keys(self._socket, self._address, self._keys)  # they may have been replaced meanwhile
        connect_if_trusted(self._socket, self._address)

    def close(self) -> None:
        self._close()


def poll_any(transports: Sequence[ZmqTransport], timeout_s: float) -> list[ZmqTransport]:
    """Wait up to `timeout_s` for a message; return the transports that have one. With no time left, return []."""
    asked: list[tuple[Any, int]] = [(transport._socket, zmq.POLLIN) for transport in transports]
    ready = dict(zmq.zmq_poll(asked, math.ceil(timeout_s * 1000))) if timeout_s > 0 else {}
    return [transport for transport in transports if transport._socket in ready]


def _close(context: zmq.Context[Any], socket: zmq.Socket[bytes], pid: int) -> None:
    if os.getpid() == pid:
        socket.close(linger=0)
        context.term()


class OwnerProcess:
    """Remembers which process made a connection: a fork of that process must not touch the socket."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._is_logged = False

    def is_current(self) -> bool:
        """Return whether this process made the connection; log once if it is a fork."""
        if os.getpid() == self._pid:
            return True
        if not self._is_logged:
            self._is_logged = True
            log.warning("a forked process cannot use its parent's connection to the draft service; make a new client")
        return False


class MessageChannel:
    """Sends and receives messages over one transport.

    One thread at a time may use it, and only in the process that made it.
    """

    def __init__(self, transport: Transport, clock: Callable[[], float] = time.monotonic) -> None:
        self._transport = transport
        self._clock = clock
        self._warn = RateLimitedWarning(log, clock)
        self._backlog: deque[list[bytes]] = deque()  # messages that are not decoded yet
        self._num_in_a_row = 0
        self._since_s = clock()

    def send(self, message: Request, version: int = OLDEST_VERSION) -> bool:
        """Send a message without waiting; return False if that is impossible, as when no service is connected.

        `version` is the one of the wire that the service reads. After such a failure, reconnect, unless the last
        connection was made less than five seconds ago.
        """
        if self._transport.send(encode(message, version)):
            return True
        if self._clock() - self._since_s > _RENEWAL_S:
            self._reconnect()
        return False

    def await_writable(self, timeout_s: float) -> None:
        """Wait until a message can be sent, at most `timeout_s`; return in either case."""
        self._transport.await_writable(timeout_s)

    def receive(self, end_s: float, waits: bool = False) -> list[Reply | None]:
        """Return the replies that have come, as many as can be decoded until `end_s`; None for a malformed message.

        With `waits`, wait until `end_s` for the first reply.
        """
        is_more = self._fill()
        if waits and not self._backlog:
            left_s = end_s - self._clock()
            is_more = left_s > 0 and self._transport.await_readable(left_s) and self._fill()
        replies: list[Reply | None] = []
        while self._backlog:
            frames = self._backlog.popleft()
            try:
                if len(frames) != 1 or len(frames[0]) > MAX_REPLY:
                    sizes = [len(frame) for frame in frames]
                    raise ValueError(f"a message of {sizes} bytes; it may be one frame of at most {MAX_REPLY}")
                reply = _decoder.decode(frames[0])
            except (ValueError, RecursionError) as error:  # those of msgspec and Unicode are ValueErrors
                self._warn("the draft service sent what is no message: %.200r", str(error))
                replies.append(None)
            else:
                replies.append(reply)
            if self._clock() >= end_s:
                break
            if is_more and not self._backlog:
                is_more = self._fill()
        return replies

    def iter_replies(self, end_s: float) -> Iterator[Reply | None]:
        """Yield replies as they come, until `end_s`; None for a malformed message."""
        while replies := self.receive(end_s, waits=True):
            yield from replies
            if self._clock() >= end_s:
                return

    def close(self) -> None:
        """Close the connection and drop queued messages. A forked process leaves its parent's connection alone."""
        self._transport.close()

    def _fill(self) -> bool:
        """Take up to 16 messages from the transport if none is left to decode; return whether more may be waiting.

        After more than 256 messages without a gap, drop those not decoded and reconnect: the service sends too fast.
        """
        if self._backlog:
            return True
        self._backlog.extend(self._transport.receive(_MAX_BATCH))
        is_more = len(self._backlog) == _MAX_BATCH
        self._num_in_a_row = self._num_in_a_row + _MAX_BATCH if is_more else 0
        if self._num_in_a_row <= _MAX_IN_A_ROW:
            return is_more
        self._warn("the draft service sends more than can be taken in; connecting anew")
        self._reconnect()
        return False

    def _reconnect(self) -> None:
        self._backlog.clear()
        self._num_in_a_row = 0
        self._since_s = self._clock()
        try:
            self._transport.reconnect()
        except AddressError as error:
            self._warn("no connection to the draft service: %s", error)


def dealer_socket(context: zmq.Context[Any], address: str, keys: ClientKeys | None = None) -> zmq.Socket[bytes]:
    """Return a DEALER socket that connects to the address, and reconnects with back-off; see `connect_if_trusted`."""
    dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, LINGER_MS)
    dealer.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY)
    dealer.setsockopt(zmq.RCVHWM, 16)
    # Nothing is queued for a service that is not there: a send then fails at once instead of waiting.
    dealer.setsockopt(zmq.IMMEDIATE, 1)
    dealer.setsockopt(zmq.SNDHWM, 1024)
    dealer.setsockopt(zmq.RECONNECT_IVL, 50)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    _use_keys(dealer, address, keys)
    if socket_path(address) is None:
        dealer.setsockopt(zmq.IPV6, "[" in address)
        dealer.setsockopt(zmq.HEARTBEAT_IVL, _BEAT_MS)
        dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, _DEAD_MS)
    connect_if_trusted(dealer, address)
    return dealer


def _use_keys(dealer: zmq.Socket[bytes], address: str, keys: ClientKeys | None) -> None:
    """Read the keys for a TCP address, and use them for the next connection; raise `AddressError` if that fails."""
    if socket_path(address) is None:
        dealer.curve_publickey, dealer.curve_secretkey, dealer.curve_serverkey = _curve_keys(address, keys)


def connect_if_trusted(dealer: zmq.Socket[bytes], address: str) -> None:
    """Connect a socket to an address; do nothing while the directory of a Unix socket does not exist.

    Anybody could create that directory, so it is checked before each connection. Raise `AddressError` if another user
    could listen at the address.
    """
    path = socket_path(address)
    if path is None or is_trusted_socket(path):
        dealer.connect(address)
