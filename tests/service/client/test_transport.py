"""A connection that died without a word is made anew, and messages are taken in time, in order, and not without end."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from specbranch.service.client.client import DraftClient
from specbranch.service.client.interface import ClientOptions
from specbranch.service.client.transport import MessageChannel
from specbranch.service.wire.addresses import ClientKeys, ServiceKeys, make_keys
from specbranch.service.wire.messages import DraftReply, encode
from tests.service.harness import PATIENCE_S, Walk, tcp_service
from tests.service.test_faults import walk_until_accepted
from tests.world.schedule import Clock


class Relay:
    """Passes connections on; those that it holds stay open, and nothing comes through them."""

    def __init__(self, to_port: int) -> None:
        self._to_port = to_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lines: list[tuple[socket.socket, socket.socket]] = []
        self._held: set[socket.socket] = set()
        self.port = int(self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def num_lines(self) -> int:
        """Connections so far."""
        return len(self._lines)

    def hold(self) -> None:
        """Let nothing through the connections that there are."""
        self._held |= {end for line in self._lines for end in line}

    def close(self) -> None:
        for one in (self._listener, *(end for line in self._lines for end in line)):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        for one in (self._listener, *(end for line in self._lines for end in line)):
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._to_port))
                except ConnectionRefusedError:  # the service is not up yet; the client comes again
                    near.close()
                    continue
                self._lines.append((near, far))
                for one, other in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._pass, args=(one, other)))
                    self._threads[-1].start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if source not in self._held:
                    sink.sendall(data)
            if source not in self._held:
                sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def relaying(address: str) -> Iterator[Relay]:
    relay = Relay(urlsplit(address).port or 0)
    try:
        yield relay
    finally:
        relay.close()


def test_a_connection_that_has_died_without_a_word_is_made_anew(tmp_path: Path) -> None:
    make_keys(tmp_path)
    service = ServiceKeys(tmp_path / "service.key_secret", tmp_path / "clients")
    keys = ClientKeys(tmp_path / "client.key_secret", tmp_path / "service.key")
    with tcp_service(service) as address, relaying(address) as relay:
        options = ClientOptions(f"tcp://127.0.0.1:{relay.port}", keys=keys, deadline_s=0.05)
        with contextlib.closing(DraftClient(options)) as client:
            assert client.hello(PATIENCE_S) is not None
            walk_until_accepted(Walk(client, [1, 2]), 1)
            relay.hold()
            num_lines = relay.num_lines
            walk_until_accepted(Walk(client, [3, 4]), 1)

            assert relay.num_lines > num_lines, "drafts came through a connection that was held"


class Inbox:
    """A transport in which messages lie."""

    def __init__(self, clock: Clock, messages: Iterator[list[bytes]]) -> None:
        self._clock, self._messages = clock, messages
        self.num_reconnects = 0

    def send(self, frame: bytes) -> bool:
        return True

    def receive(self, max_messages: int) -> list[list[bytes]]:
        return list(itertools.islice(self._messages, max_messages))

    def await_readable(self, timeout_s: float) -> bool:
        self._clock.leap(timeout_s)
        return False

    def await_writable(self, timeout_s: float) -> None:
        pass

    def reconnect(self) -> None:
        self.num_reconnects += 1

    def close(self) -> None:
        pass


def reply(number: int) -> list[bytes]:
    return [encode(DraftReply(number, []))]


def test_messages_that_there_is_no_time_for_come_next_in_order() -> None:
    clock = Clock()
    channel = MessageChannel(Inbox(clock, map(reply, range(40))), clock)
    first = channel.receive(clock())  # the time is up after one message
    rest = channel.receive(clock() + 1.0)

    assert [*first, *rest] == [DraftReply(number, []) for number in range(40)]
    assert len(first) == 1
    assert channel.receive(clock() + 1.0, waits=True) == []


def test_a_message_that_is_none_leaves_a_gap() -> None:
    clock = Clock()
    messages = [reply(1), [b"?"], [*reply(2), b""], [b"\xc1" * 3], reply(3)]
    channel = MessageChannel(Inbox(clock, iter(messages)), clock)

    assert channel.receive(clock() + 1.0) == [DraftReply(1, []), None, None, None, DraftReply(3, [])]


def test_a_service_that_sends_without_a_pause_is_dropped() -> None:
    clock = Clock()
    inbox = Inbox(clock, map(reply, itertools.count()))

    assert len(MessageChannel(inbox, clock).receive(clock() + 1.0)) == 256
    assert inbox.num_reconnects == 1
