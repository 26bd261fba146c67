"""The network of a simulated world: one link for each client, one router for the service; messages may go astray."""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Callable

import zmq

from specbranch.service.server.fair_queue import Message
from tests.world.faults import Faults
from tests.world.schedule import Actor, Schedule

_QUEUE = 64  # messages that wait for a client; more are dropped, as ZeroMQ does
_USUAL_S, _SLOW_S = 0.0005, 0.2
_SEND_S = 0.0001  # a client takes at most so long to send
_CONNECT_S = (0.05, 2.0)


class WorldLink:
    """A client's end: a `Transport`. Under another name after every reconnect."""

    def __init__(self, network: Network, actor: Actor) -> None:
        self._network = network
        self._actor = actor
        self._is_waiting = False
        self.name = b""
        self.is_connected = False
        self.inbox: deque[list[bytes]] = deque()
        self.sent_s = self.heard_s = 0.0  # when the last message of each way arrives: they keep their order
        network.connect(self)

    def send(self, frame: bytes) -> bool:
        self._actor.wait(self._network.rng.random() * _SEND_S)
        if not self.is_connected:
            return False
        self._network.to_service(self, frame)
        return True

    def receive(self, max_messages: int) -> list[list[bytes]]:
        return [self.inbox.popleft() for _ in range(min(len(self.inbox), max_messages))]

    def await_readable(self, timeout_s: float) -> bool:
        if not self.inbox:
            self._is_waiting = True
            self._actor.wait(math.ceil(1000 * timeout_s) / 1000)
            self._is_waiting = False
        return bool(self.inbox)

    def await_writable(self, timeout_s: float) -> None:
        self._actor.wait(timeout_s)

    def reconnect(self) -> None:
        self._network.close(self)
        self._network.connect(self)

    def close(self) -> None:
        self._network.close(self)

    def take(self, frames: list[bytes]) -> None:
        if len(self.inbox) < _QUEUE:
            self.inbox.append(frames)
        if self._is_waiting:
            self._is_waiting = False
            self._actor.wake()


class WorldRouter:
    """The service's end: a `Router`. `heard` and `said` see every message that passes it."""

    def __init__(
        self, network: Network, heard: Callable[[bytes, bytes], None], said: Callable[[bytes, bytes], None]
    ) -> None:
        self._network = network
        self._heard = heard
        self._said = said
        self.inbox: deque[tuple[bytes, bytes]] = deque()

    def receive(self) -> Message:
        if not self.inbox:
            raise zmq.Again
        client, frame = self.inbox.popleft()
        self._heard(client, frame)
        return Message(client, b"", [frame])

    def send(self, client: bytes, frame: bytes) -> None:
        self._said(client, frame)
        self._network.to_client(client, frame)


class Network:
    """All links, and the router if the service is up. `arrived`: a message has come to the router."""

    def __init__(self, schedule: Schedule, rng: random.Random, arrived: Callable[[], None]) -> None:
        self._schedule = schedule
        self._arrived = arrived
        self._names = itertools.count(1)
        self._links: dict[bytes, WorldLink] = {}
        self.rng = rng
        self.faults = Faults()
        self.router: WorldRouter | None = None

    @property
    def links(self) -> list[WorldLink]:
        return list(self._links.values())

    def connect(self, link: WorldLink) -> None:
        """Under a new name; messages can be sent after a while, once the service is up."""
        link.name = b"client-%d" % next(self._names)
        self._links[link.name] = link
        self._await_service(link, link.name)

    def drop(self, link: WorldLink) -> None:
        """What is under way is lost. The link connects anew, or is dead until its owner renews it."""
        self.close(link)
        if self.rng.random() < 0.8:
            self.connect(link)

    def close(self, link: WorldLink) -> None:
        link.is_connected = False
        link.inbox.clear()
        self._links.pop(link.name, None)

    def open(self, router: WorldRouter) -> None:
        self.router = router

    def shut(self) -> None:
        """The service is gone, and everybody sees it."""
        self.router = None
        for link in self.links:
            self.close(link)
            self.connect(link)

    def to_service(self, link: WorldLink, frame: bytes) -> None:
        name, router = link.name, self.router
        link.sent_s = self._post(frame, link.sent_s, lambda sent: self._reach_service(name, router, sent))

    def to_client(self, name: bytes, frame: bytes) -> None:
        link = self._links.get(name)
        if link is not None:
            link.heard_s = self._post(frame, link.heard_s, lambda sent: self._reach_client(name, sent))

    def _post(self, frame: bytes, last_s: float, deliver: Callable[[bytes], None]) -> float:
        """Send a frame on its way; when it arrives, unless that is out of turn."""
        rng, faults, now_s = self.rng, self.faults, self._schedule.now_s
        if rng.random() < faults.lost:
            return last_s
        if rng.random() < faults.garbled:
            frame = _garbled(frame, rng)
        for _ in range(2 if rng.random() < faults.doubled else 1):
            at_s = now_s + rng.random() * (_SLOW_S if rng.random() < faults.delayed else _USUAL_S)
            if rng.random() >= faults.reordered:
                at_s = last_s = max(at_s, last_s)
            self._schedule.after(at_s - now_s, lambda sent=frame: deliver(sent))  # type: ignore[misc]
        return last_s

    def _reach_service(self, name: bytes, router: WorldRouter | None, frame: bytes) -> None:
        if router is not None and router is self.router:
            router.inbox.append((name, frame))
            self._arrived()

    def _reach_client(self, name: bytes, frame: bytes) -> None:
        link = self._links.get(name)
        if link is not None:
            link.take([frame])

    def _await_service(self, link: WorldLink, name: bytes) -> None:
        def reach() -> None:
            if link.name != name or name not in self._links:
                return
            if self.router is None:
                self._await_service(link, name)
            else:
                link.is_connected = True

        self._schedule.after(self.rng.uniform(*_CONNECT_S) * self.rng.random(), reach)


def _garbled(frame: bytes, rng: random.Random) -> bytes:
    """What no reader can take for a message."""
    return frame[: rng.randrange(len(frame))] if rng.random() < 0.5 else b"\xc1" + rng.randbytes(8)
