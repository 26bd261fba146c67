"""A client's socket: single frames out, messages in. All of ZeroMQ on the client's side is here.

Nothing here reads a clock or a message, so that another transport can take its place.
"""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import zmq

from specbranch.service.endpoint import ClientKeys, connected, reach


class Link(Protocol):
    """A way to a service that connects by itself, again and again. Nothing raises unless it says so."""

    def send(self, frame: bytes) -> bool:
        """Whether the frame is on its way; False, at once, if there is nobody to send it to."""
        ...

    def receive(self) -> list[bytes] | None:
        """The frames of a message that is here; None, at once, if there is none."""
        ...

    def await_readable(self, timeout_s: float) -> bool:
        """Wait until a message is here, or the time is up; whether there is one."""
        ...

    def await_writable(self, timeout_s: float) -> None:
        """Wait until something can be sent, or the time is up."""
        ...

    def renew(self) -> None:
        """Connect anew; raises `EndpointError` if somebody else could listen there."""
        ...

    def close(self) -> None:
        """Let go; nothing that is still queued is waited for."""
        ...


class SocketLink:
    """One DEALER socket. A fork leaves its parent's alone when it is closed."""

    def __init__(self, address: str, keys: ClientKeys | None = None) -> None:
        self._address = address
        context: zmq.Context[Any] = zmq.Context()
        try:
            self._socket = connected(context, address, keys)
        except BaseException:
            context.destroy(linger=0)
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        # What finalizes holds the socket too: a context that is collected before its socket waits for it forever.
        self._close = weakref.finalize(self, _close, context, self._socket, os.getpid())

    def send(self, frame: bytes) -> bool:
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[bytes] | None:
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def await_readable(self, timeout_s: float) -> bool:
        return bool(self._poller.poll(math.ceil(timeout_s * 1000)))

    def await_writable(self, timeout_s: float) -> None:
        self._socket.poll(math.ceil(timeout_s * 1000), zmq.POLLOUT)

    def renew(self) -> None:
        with contextlib.suppress(zmq.ZMQError):  # it was not connected
            self._socket.disconnect(self._address)
        reach(self._socket, self._address)

    def close(self) -> None:
        self._close()


def await_any(links: Sequence[SocketLink], timeout_s: float) -> list[SocketLink]:
    """Those with a message, as soon as one of them has one; none if the time is up before."""
    asked: list[tuple[Any, int]] = [(link._socket, zmq.POLLIN) for link in links]
    ready = dict(zmq.zmq_poll(asked, math.ceil(timeout_s * 1000))) if timeout_s > 0 else {}
    return [link for link in links if link._socket in ready]


def _close(context: zmq.Context[Any], socket: zmq.Socket[bytes], pid: int) -> None:
    if os.getpid() == pid:
        socket.close(linger=0)
        context.term()
