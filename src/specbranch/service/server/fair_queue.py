"""Per-client queues of messages, served by decayed usage.

Whoever has taken the least of the thread's time lately goes first, with one message; then it is looked again. So one
client with many messages, or with messages that take long, holds up nobody else for longer than one message takes.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

_MAX_BYTES = 16 << 20
_MAX_MESSAGES = 1 << 14
_OVERHEAD = 256  # bytes that a message takes beside its own
_HALF_LIFE_S = 1.0
_NEWCOMER_S = 0.25  # of the thread's time: more than a target takes lately that decodes a few sequences
_STALE_S = 1.0  # of the thread's time on others: who waited for an answer waits no more
_MOST = 1024  # that are told apart


class Message(NamedTuple):
    """What came from a client. `user` names the key that it has proved to have; empty where no keys are used."""

    client: bytes
    user: bytes
    frames: Sequence[bytes]

    @property
    def size(self) -> int:
        """Bytes that it takes here."""
        return _OVERHEAD + sum(len(frame) for frame in self.frames)


class FairQueue:
    """Bounded: where there is no room, the client whose messages take the most loses its newest one.

    What has waited too long is dropped. Time is that which serving took: a process that stood still loses nothing.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        max_bytes: int = _MAX_BYTES,
        max_messages: int = _MAX_MESSAGES,
    ) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self._max_messages = max_messages
        self._queues: dict[bytes, deque[tuple[float, Message]]] = {}  # with the time spent when it came
        self._spent_s = 0.0
        self._sizes: dict[bytes, int] = {}
        self._num_messages = 0
        self.num_bytes = 0  # of all that wait
        self._used = DecayedUsage(_HALF_LIFE_S, newcomer=_NEWCOMER_S)
        self.num_dropped = 0

    def __len__(self) -> int:
        return self._num_messages

    def push(self, message: Message) -> None:
        """Let a message wait."""
        self._queues.setdefault(message.client, deque()).append((self._spent_s, message))
        self._sizes[message.client] = self._sizes.get(message.client, 0) + message.size
        self._num_messages += 1
        self.num_bytes += message.size
        while self._num_messages > self._max_messages or self.num_bytes > self._max_bytes:
            largest = max(self._sizes, key=lambda client: self._sizes[client])
            self._took(self._queues[largest].pop()[1])
            self.num_dropped += 1

    def pop(self) -> Message | None:
        """The next message to serve; None if there is none."""
        while self._queues:
            now_s = self._clock()
            client = min(self._queues, key=lambda one: self._used.get(one, now_s))
            since_s, message = self._queues[client].popleft()
            self._took(message)
            if self._spent_s - since_s <= _STALE_S:
                return message
            self.num_dropped += 1
        return None

    def charge(self, client: bytes, seconds: float) -> None:
        """Serving a message of this client took so long."""
        self._spent_s += seconds
        self._used.add(client, seconds, self._clock())

    def _took(self, message: Message) -> None:
        """A message has left its queue."""
        client = message.client
        self._num_messages -= 1
        self.num_bytes -= message.size
        self._sizes[client] -= message.size
        if not self._queues[client]:
            del self._queues[client], self._sizes[client]


class DecayedUsage:
    """Amounts by key; what was used counts half after `half_life_s`. Who has used nothing for longest makes way.

    `newcomer` is what an unknown key counts as: those who are known to use little go before strangers.
    """

    def __init__(self, half_life_s: float, newcomer: float = 0.0) -> None:
        self._half_life_s = half_life_s
        self._newcomer = newcomer
        self._used: OrderedDict[bytes, tuple[float, float]] = OrderedDict()  # amount, and when it was that

    def get(self, key: bytes, now_s: float) -> float:
        """What counts now."""
        amount, at_s = self._used.get(key, (self._newcomer, now_s))
        return float(amount * 0.5 ** ((now_s - at_s) / self._half_life_s))

    def add(self, key: bytes, amount: float, now_s: float) -> None:
        """So much more was used."""
        self._used[key] = (self.get(key, now_s) + amount, now_s)
        self._used.move_to_end(key)
        if len(self._used) > _MOST:
            self._used.popitem(last=False)
